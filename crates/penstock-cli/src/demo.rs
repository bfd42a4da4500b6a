use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;

use crate::exit::{CommandError, FAILED};
use crate::worker::python;

#[derive(Args)]
pub struct Arguments {
    /// Arguments of the demo itself
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Replaces this process with Python, which runs the demo.
pub fn run(arguments: Arguments) -> Result<(), CommandError> {
    let python = python();
    let error = Command::new(&python)
        .args(["-m", "penstock._demo"])
        .args(arguments.arguments)
        .exec();
    Err(CommandError::new(
        FAILED,
        format!("can't run {}: {error}", python.display()),
    ))
}
