use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use penstock_broker::published_in;
use penstock_journal::{JournalOptions, Lost, RepairReport, repair};

use super::open_existing;
use crate::exit::{CommandError, DAMAGED};
use crate::text::{printable, show};

pub fn run(directory: &Path) -> Result<(), CommandError> {
    let storage = open_existing(directory)?;
    let mut options = JournalOptions::default();
    options.fit_to_disk(storage.disk_bytes()?);
    getrandom::fill(&mut options.journal_id).map_err(std::io::Error::from)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let stamp = now.map_or(0, |since| since.as_secs()).to_string();
    let report = repair(directory, &options, &stamp)?;
    show(&repaired(&report))?;
    let count: u64 = report.lost.iter().map(|lost| lost.records).sum();
    let more = match report.lost.iter().any(|lost| lost.is_open_ended) {
        true => " and perhaps more",
        false if count == 0 => return Ok(()),
        false => "",
    };
    let text = format!("repaired; {count} records{more} were lost, as listed");
    Err(CommandError::new(DAMAGED, text))
}

const WHAT_A_LOSS_MEANS: &str = "\
A record holds the decisions of one moment. A lost record may have held:
  an enqueued job           it is gone; enqueue it again
  the end of a job          it runs again, though it may have succeeded; its result is written again
  a retry or a delay        the job is where it was before
  a result or a lock        it is gone; a deleted one may be back
  a group or a chain        it may never continue: `penstock purge` its queue and send it again
No worker can settle a job with a lease from before the repair.
";

fn repaired(report: &RepairReport) -> String {
    let mut text = match report.put_back {
        0 => String::new(),
        count => {
            format!("{count} segments were stored under each other's names, and were renamed\n")
        }
    };
    let Some(aside) = &report.damaged_files else {
        text.push_str(match report.put_back {
            0 => "the journal is sound; nothing was changed\n",
            _ => "nothing else was damaged; no record was lost\n",
        });
        return text;
    };
    for lost in &report.lost {
        text.push_str(&described(lost));
    }
    if report
        .lost
        .iter()
        .any(|lost| lost.records > 0 || lost.is_open_ended)
    {
        text.push_str(WHAT_A_LOSS_MEANS);
    }
    match report.resumed {
        true => text.push_str("finished an earlier repair that was interrupted\n"),
        false => text.push_str(&format!("{} records were kept\n", report.records)),
    }
    if report.torn_batches > 0 {
        text.push_str(&format!(
            "{} interrupted writes were cut off; none was confirmed\n",
            report.torn_batches
        ));
    }
    text.push_str(&format!("the damaged files are in {}\n", aside.display()));
    text
}

fn described(lost: &Lost) -> String {
    let records = match (lost.records, lost.is_open_ended) {
        (0, false) => "no record".to_owned(),
        (0, true) => format!("all records from {} on, if there were any", lost.position),
        (1, false) => format!("record {}", lost.position),
        (count, false) => format!("records {} to {}", lost.position, lost.position + count - 1),
        (count, true) => format!(
            "{count} records from {} on, and perhaps more",
            lost.position
        ),
    };
    let place = match (lost.file.as_str(), lost.from, lost.to) {
        ("", ..) => String::new(),
        (file, from, to) if from >= to => format!(" ({file})"),
        (file, from, to) => format!(" ({file}, bytes {from} to {to})"),
    };
    let mut text = format!("lost: {records}{place}: {}\n", lost.what);
    for job in lost
        .remains
        .iter()
        .flat_map(|remains| published_in(remains))
    {
        text.push_str(&format!(
            "  with job {} of {} in queue {}, if the remaining bytes can be trusted\n",
            job.id,
            printable(&job.task),
            printable(&job.queue)
        ));
    }
    text
}
