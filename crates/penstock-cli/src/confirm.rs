//! Asks before anything irreversible.

use std::io::{IsTerminal, Write, stderr, stdin};

use clap::Args;

use crate::exit::{CommandError, FAILED, WRONG_CALL};

#[derive(Args)]
pub struct ConfirmArguments {
    /// Don't ask for confirmation
    #[arg(short, long)]
    yes: bool,
}

impl ConfirmArguments {
    /// Asks for confirmation. Without a terminal, only `-y` counts as an answer.
    pub fn ask(&self, question: &str) -> Result<(), CommandError> {
        if self.yes {
            return Ok(());
        }
        if !stdin().is_terminal() {
            let text = format!(
                "{question} Nothing was changed: there is no terminal for the answer. Give -y to confirm"
            );
            return Err(CommandError::new(WRONG_CALL, text));
        }
        // Standard output is for the answer, which may be JSON.
        write!(stderr(), "{question} [y/N] ")?;
        stderr().flush()?;
        let mut answer = String::new();
        stdin().read_line(&mut answer)?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(CommandError::new(FAILED, "nothing was changed")),
        }
    }
}
