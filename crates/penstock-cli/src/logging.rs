//! Sends the log to standard error (as text or JSON), or to a local broker's file.

use std::fs::File;
use std::io::{self, IsTerminal, Write, stderr};
use std::sync::{Mutex, PoisonError};

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Whether standard error has its last line, which says why the command ends.
static ENDED: Mutex<bool> = Mutex::new(false);

#[derive(Args)]
pub struct LogArguments {
    /// Log every event; the same as --log-level debug
    #[arg(short, long)]
    pub verbose: bool,
    /// How much to log
    #[arg(long, value_enum, default_value_t = LogLevel::Info, ignore_case = true, env = "PENSTOCK_LOG_LEVEL")]
    pub log_level: LogLevel,
    /// Log text for people, or one JSON object per line
    #[arg(long, value_enum, default_value_t = LogFormat::Text, env = "PENSTOCK_LOG_FORMAT")]
    pub log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum LogLevel {
    Error,
    #[value(alias = "warn")]
    Warning,
    Info,
    Debug,
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warning => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

impl LogArguments {
    pub fn level(&self) -> LogLevel {
        match self.verbose {
            true => LogLevel::Debug,
            false => self.log_level,
        }
    }

    pub fn to_stderr(&self) {
        self.begin(|| UntilTheEnd(stderr()), stderr().is_terminal());
    }

    pub fn to_file(&self, file: File) {
        self.begin(Mutex::new(file), false);
    }

    fn begin<W>(&self, writer: W, colours: bool)
    where
        W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
    {
        let level = LevelFilter::from(self.level());
        let filter = EnvFilter::builder()
            .with_default_directive(level.into())
            .with_env_var("PENSTOCK_LOG")
            .from_env_lossy();
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(writer)
            .with_ansi(colours)
            .with_target(false)
            // A line that can't be written (its reader exited, the disk is full) is lost, with no other effect.
            // The default would report it on standard error, which is usually the output that just failed. That
            // report panics, and a broker that panics aborts.
            .log_internal_errors(false);
        match self.log_format {
            LogFormat::Text => log.init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
    }
}

/// Writes the line that says why the command ends. Threads that still run, such as one that waits for a slow disk,
/// log nothing after it.
pub fn end(mut output: impl Write, line: &str) -> io::Result<()> {
    let mut ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
    *ended = true;
    writeln!(output, "{line}")
}

/// Output of the log, which drops what comes after the last line.
struct UntilTheEnd<W>(W);

impl<W: Write> Write for UntilTheEnd<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes).map(|()| bytes.len())
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        let ended = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return Ok(());
        }
        self.0.write_all(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_says_why_the_command_ends_is_the_last() {
        let mut output = Vec::new();
        UntilTheEnd(&mut output).write_all(b"logged\n").unwrap();
        end(&mut output, "penstock: the disk failed").unwrap();
        UntilTheEnd(&mut output)
            .write_all(b"logged late\n")
            .unwrap();
        assert_eq!(output, b"logged\npenstock: the disk failed\n");
    }
}
