//! Finds slots by the numbers of their messages during a replay.

use rustc_hash::FxHashMap;

const NONE: u32 = u32::MAX;
/// Length of a run of neighbouring numbers that are stored together, in one line of the processor's cache. Numbers are
/// assigned one after the other, and the journal mentions neighbours together.
const RUN: u64 = 16;

#[derive(Debug, Default)]
pub(crate) struct SlotsByNumber {
    runs: FxHashMap<u64, [u32; RUN as usize]>,
}

impl SlotsByNumber {
    pub(crate) fn of(&self, number: u64) -> Option<u32> {
        let run = self.runs.get(&(number / RUN))?;
        Some(run[(number % RUN) as usize]).filter(|slot| *slot != NONE)
    }

    pub(crate) fn put(&mut self, number: u64, slot: u32) {
        let run = self.runs.entry(number / RUN);
        run.or_insert([NONE; RUN as usize])[(number % RUN) as usize] = slot;
    }

    pub(crate) fn take(&mut self, number: u64) -> Option<u32> {
        let run = self.runs.get_mut(&(number / RUN))?;
        let slot = std::mem::replace(&mut run[(number % RUN) as usize], NONE);
        if *run == [NONE; RUN as usize] {
            self.runs.remove(&(number / RUN));
        }
        Some(slot).filter(|slot| *slot != NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_until_it_is_taken_and_leaves_nothing_behind() {
        let mut slots = SlotsByNumber::default();
        let numbers = (0..100).chain([1 << 40, u64::MAX]);
        for (slot, number) in numbers.clone().enumerate() {
            slots.put(number, slot as u32);
        }
        slots.put(7, 1_000);
        for (slot, number) in numbers.enumerate() {
            let slot = if number == 7 { 1_000 } else { slot as u32 };
            assert_eq!(slots.of(number), Some(slot));
            assert_eq!(slots.take(number), Some(slot));
            assert_eq!((slots.of(number), slots.take(number)), (None, None));
        }
        assert!(slots.runs.is_empty());
    }
}
