//! Enumerates the ways in which a power cut can leave the disk, as far as they can be counted.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use super::{Disk, Inode, Rng, SECTOR, SimStorage, Write, put};

/// Choice that a power cut makes between several outcomes, ordered from the oldest state to the newest.
#[derive(Clone, Copy, Debug)]
enum CutChoice {
    /// Version of a sector of a file that is on the disk.
    Sector {
        file: usize,
        sector: u64,
    },
    Length {
        file: usize,
    },
    /// Whether a change to the directory got through.
    Entry {
        index: usize,
    },
}

impl SimStorage {
    /// Returns the disks that may be found after a power cut now: each combination of sectors, lengths and names that
    /// may have got through. When there are more than `cap`, returns the extremes (nothing, all, all but one change,
    /// only one) and then random ones.
    pub fn leftovers(&self, cap: usize, rng: &mut Rng) -> Vec<Self> {
        let found = self.disk().clone();
        let choices = found.choices();
        let outcomes = picks(&choices, cap, rng);
        let left = outcomes.into_iter().map(|picked| {
            let mut disk = found.clone();
            for ((choice, _), picked) in choices.iter().zip(picked) {
                disk.decide(*choice, picked, &found);
            }
            disk.pending_entries.clear();
            for file in &mut disk.files {
                file.pending.clear();
                file.cached.clone_from(&file.durable);
            }
            disk.come_back();
            disk.end_process();
            Self {
                process: disk.process,
                disk: Arc::new(Mutex::new(disk)),
            }
        });
        left.collect()
    }
}

/// Returns the outcomes of the choices, at most `cap` of them.
fn picks(choices: &[(CutChoice, u64)], cap: usize, rng: &mut Rng) -> BTreeSet<Vec<u64>> {
    let ways = choices.iter().map(|(_, outcomes)| u128::from(*outcomes));
    let mut picks = BTreeSet::new();
    if ways.fold(1, u128::saturating_mul) <= cap as u128 {
        let mut pick = vec![0; choices.len()];
        loop {
            picks.insert(pick.clone());
            // Each choice is a digit of a number: take the next one.
            let Some(digit) = (0..pick.len()).find(|digit| pick[*digit] + 1 < choices[*digit].1)
            else {
                return picks;
            };
            pick[..digit].fill(0);
            pick[digit] += 1;
        }
    }
    let nothing = vec![0; choices.len()];
    let all: Vec<u64> = choices.iter().map(|(_, outcomes)| outcomes - 1).collect();
    picks.insert(nothing.clone());
    picks.insert(all.clone());
    for index in 0..choices.len() {
        let (mut without, mut alone) = (all.clone(), nothing.clone());
        without[index] = 0;
        alone[index] = all[index];
        picks.extend([without, alone]);
    }
    while picks.len() > cap {
        picks.pop_last();
    }
    while picks.len() < cap {
        picks.insert(
            choices
                .iter()
                .map(|(_, outcomes)| rng.below(*outcomes))
                .collect(),
        );
    }
    picks
}

impl Disk {
    fn choices(&self) -> Vec<(CutChoice, u64)> {
        let mut choices = Vec::new();
        for (file, inode) in self.files.iter().enumerate() {
            let sectors: BTreeSet<u64> = inode.pending.iter().flat_map(Write::sectors).collect();
            for sector in sectors {
                let versions = inode.versions(sector).count() as u64 + 1;
                choices.push((CutChoice::Sector { file, sector }, versions));
            }
            choices.push((CutChoice::Length { file }, inode.lengths().len() as u64));
        }
        choices
            .extend((0..self.pending_entries.len()).map(|index| (CutChoice::Entry { index }, 2)));
        choices.retain(|(_, outcomes)| *outcomes > 1);
        choices
    }

    /// Applies one choice. `found`: the disk before any choice was applied.
    fn decide(&mut self, choice: CutChoice, picked: u64, found: &Self) {
        match choice {
            CutChoice::Sector { file, sector } => {
                let durable = &mut self.files[file].durable;
                for write in found.files[file].versions(sector).take(picked as usize) {
                    let start = (sector * SECTOR).max(write.offset);
                    let end = ((sector + 1) * SECTOR).min(write.end());
                    let piece = (start - write.offset) as usize..(end - write.offset) as usize;
                    put(durable, start, &write.bytes[piece]);
                }
            }
            // The length comes after the sectors of the file.
            CutChoice::Length { file } => {
                let length = found.files[file].lengths()[picked as usize];
                self.files[file].durable.resize(length as usize, 0);
            }
            CutChoice::Entry { index } => {
                if picked == 1 {
                    let change = found.pending_entries[index].clone();
                    change.apply(&mut self.durable_directory);
                }
            }
        }
    }
}

impl Inode {
    /// Counts the writes that a sector has seen since its last sync.
    fn versions(&self, sector: u64) -> impl Iterator<Item = &Write> {
        let touches = move |write: &&Write| write.sectors().contains(&sector);
        self.pending.iter().filter(touches)
    }

    /// Lists the lengths that the file has had since its last sync.
    fn lengths(&self) -> Vec<u64> {
        let mut lengths = vec![self.durable.len() as u64];
        for write in &self.pending {
            let length = write.end().max(lengths[lengths.len() - 1]);
            if length > lengths[lengths.len() - 1] {
                lengths.push(length);
            }
        }
        lengths
    }
}
