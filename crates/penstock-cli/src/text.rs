//! Formats output for people: tables, sizes, times.

use std::io::{ErrorKind, Write, stdout};

use penstock_message::{MessageState, Overflow, QueueLimits};

use crate::exit::CommandError;

/// Prints text. Succeeds when the reader closes the pipe early (`| head`).
pub fn show(text: &str) -> Result<(), CommandError> {
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// Prints one JSON value on its own line.
pub fn show_json(value: &serde_json::Value) -> Result<(), CommandError> {
    show(&format!("{value}\n"))
}

/// Formats a number with its noun: `1 job`, `2 jobs`.
pub fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// Returns the name of a job's state, as `JobState` has it in Python.
pub fn state_name(state: MessageState) -> &'static str {
    match state {
        MessageState::Ready => "waiting",
        MessageState::Delayed => "delayed",
        MessageState::Running | MessageState::Parked => "running",
        MessageState::Cancelling => "cancelling",
        MessageState::Held => "held",
        MessageState::Failed => "failed",
        MessageState::Blocked => "blocked",
    }
}

/// Escapes text from outside, such as a queue's name or an error, for one line of output. Names may have any
/// character, so this escapes those that control a terminal, break a line or reorder the text after them.
/// Escaping twice changes nothing more.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for letter in text.chars() {
        let is_invisible_order = matches!(
            letter,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        );
        match letter.is_control() || is_invisible_order {
            true => shown.extend(letter.escape_default()),
            false => shown.push(letter),
        }
    }
    shown
}

/// Escapes text like [`printable`], but keeps its line breaks.
pub fn printable_lines(text: &str) -> String {
    let lines: Vec<String> = text.split('\n').map(printable).collect();
    lines.join("\n")
}

/// Shortens text to one line of at most `most` characters.
pub fn shortened(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most - 1).chain(['…']).collect(),
        false => text.to_owned(),
    }
}

/// Indents the lines of text from outside, below a heading.
pub fn indented(text: &str) -> String {
    text.lines()
        .map(|line| format!("  {}\n", printable(line)))
        .collect()
}

/// Table with columns of the width that they need; numbers are aligned to the right.
pub struct TextTable {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl TextTable {
    /// Creates a table. A heading that begins with `>` marks a column of numbers.
    pub fn new(headings: &[&str]) -> Self {
        Self {
            rows: vec![
                headings
                    .iter()
                    .map(|heading| heading.trim_start_matches('>').to_owned())
                    .collect(),
            ],
            right: headings
                .iter()
                .map(|heading| heading.starts_with('>'))
                .collect(),
        }
    }

    /// Adds a row. Cells may contain any text.
    pub fn row(&mut self, cells: Vec<String>) {
        let cells = cells.iter().map(|cell| printable(cell));
        self.rows.push(cells.collect());
    }
}

impl std::fmt::Display for TextTable {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, width), right) in row.iter().zip(&widths).zip(&self.right) {
                let cell = match right {
                    true => format!("{cell:>width$}  "),
                    false => format!("{cell:<width$}  "),
                };
                line.push_str(&cell);
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut rest = count as f64;
    while rest >= 1024.0 && unit + 1 < UNITS.len() {
        rest /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{count} B"),
        _ => format!("{rest:.1} {}", UNITS[unit]),
    }
}

/// Reads a size such as `4096`, `64K`, `64M` or `2G`, in powers of 1024.
pub fn byte_count(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" | "kib" => 1 << 10,
        "m" | "mb" | "mib" => 1 << 20,
        "g" | "gb" | "gib" => 1 << 30,
        other => return Err(format!("{other:?} is not a unit: use K, M or G")),
    };
    let count: u64 = digits
        .parse()
        .map_err(|_| format!("{digits:?} is not a whole number"))?;
    count
        .checked_mul(unit)
        .ok_or_else(|| "it is too large".to_owned())
}

/// Describes limits, such as `at most 1000 jobs or 64.0 MiB, oldest dropped when full`.
pub fn limits(limits: &QueueLimits) -> String {
    let length = limits.max_length.map(|length| count(length, "job"));
    let size = limits.max_bytes.map(bytes);
    let most: Vec<String> = length.into_iter().chain(size).collect();
    match (most.is_empty(), limits.overflow) {
        (true, _) => "no limit".to_owned(),
        (false, Overflow::Reject) => format!("at most {}", most.join(" or ")),
        (false, Overflow::DropOldest) => {
            format!("at most {}, oldest dropped when full", most.join(" or "))
        }
    }
}

/// Formats a duration with its two largest units, such as `3 min 20 s`.
pub fn duration_ms(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms} ms"),
        1..10 => format!("{:.1} s", ms as f64 / 1000.0),
        10..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} min", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

pub fn sync_us(us: u64) -> String {
    match us {
        0 => "not measured yet".to_owned(),
        1..10_000 => format!("{us} µs"),
        _ => format!("{:.1} ms", us as f64 / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = TextTable::new(&["QUEUE", ">READY"]);
        table.row(vec!["mail".to_owned(), "3".to_owned()]);
        table.row(vec!["thumbnails".to_owned(), "12000".to_owned()]);
        assert_eq!(
            table.to_string(),
            "QUEUE       READY\nmail            3\nthumbnails  12000\n"
        );
    }

    #[test]
    fn a_noun_agrees_with_its_number() {
        assert_eq!(count(0, "job"), "0 jobs");
        assert_eq!(count(1, "job"), "1 job");
        assert_eq!(count(2, "job"), "2 jobs");
    }

    #[test]
    fn nothing_from_outside_gives_orders_to_a_terminal() {
        let check = |text: &str, expected: &str| {
            assert_eq!(printable(text), expected);
            assert_eq!(printable(&printable(text)), expected, "twice");
        };
        check("mail", "mail");
        check("grüße 手紙 \u{1f4e8}", "grüße 手紙 \u{1f4e8}");
        check("a\nforged  9", "a\\nforged  9");
        check("\u{1b}[2J\r\0\t", "\\u{1b}[2J\\r\\u{0}\\t");
        check("\u{7f}\u{9b}31m", "\\u{7f}\\u{9b}31m");
        check("\u{202e}liam\u{2028}", "\\u{202e}liam\\u{2028}");
        assert_eq!(printable_lines("one\ntwo\u{1b}"), "one\ntwo\\u{1b}");
    }

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(byte_count("64m"), Ok(64 << 20));
        assert_eq!(byte_count("4096"), Ok(4096));
        assert!(byte_count("64 pounds").is_err());
        assert!(byte_count("99999999999G").is_err());
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(16 << 20), "16.0 MiB");
        assert_eq!(duration_ms(999), "999 ms");
        assert_eq!(duration_ms(1500), "1.5 s");
        assert_eq!(duration_ms(200_000), "3 min 20 s");
        assert_eq!(duration_ms(90_000_000), "1 d 1 h");
        assert_eq!(sync_us(110), "110 µs");
        assert_eq!(sync_us(15_000), "15.0 ms");
    }
}
