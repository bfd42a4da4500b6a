//! Sends the log to standard error (as text or JSON), or to a local broker's file.

use std::fs::File;
use std::io::{IsTerminal, stderr};
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

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
        self.begin(stderr, stderr().is_terminal());
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
