//! Asks before anything that can't be undone.

use std::io::{IsTerminal, Write, stderr, stdin};

use clap::Args;

use crate::exit::{FAILED, Failure, WRONG_CALL};

#[derive(Args)]
pub struct Confirm {
    /// Don't ask
    #[arg(short, long)]
    yes: bool,
}

impl Confirm {
    /// Asks a person. Without a terminal, only `-y` is an answer.
    pub fn ask(&self, question: &str) -> Result<(), Failure> {
        if self.yes {
            return Ok(());
        }
        if !stdin().is_terminal() {
            let text = format!(
                "{question} There is no terminal to ask at: give -y to do it. Nothing was changed"
            );
            return Err(Failure::new(WRONG_CALL, text));
        }
        // Standard output is for the answer, which may be JSON.
        write!(stderr(), "{question} [y/N] ")?;
        stderr().flush()?;
        let mut answer = String::new();
        stdin().read_line(&mut answer)?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => Err(Failure::new(FAILED, "nothing was changed")),
        }
    }
}
