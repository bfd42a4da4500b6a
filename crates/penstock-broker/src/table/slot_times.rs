//! Times of slots, in chunks that exist only where some slot has a time.

use crate::clock::{ClockTime, WhichClock};

/// Times of some of the slots.
#[derive(Debug, Default)]
pub(crate) struct SlotTimes {
    chunks: Vec<Option<SlotTimesChunk>>,
    len: usize,
}

#[derive(Debug)]
struct SlotTimesChunk {
    times: Box<[u64; CHUNK]>,
    len: u32,
}

const CHUNK: usize = 256;
const NO_TIME: u64 = 0;

impl SlotTimes {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<ClockTime> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?.as_ref()?;
        let time = chunk.times[slot as usize % CHUNK];
        let clock = match time & 1 {
            0 => WhichClock::Steady,
            _ => WhichClock::Wall,
        };
        let at = (time >> 1).checked_sub(1)?;
        Some(ClockTime { at, clock })
    }

    #[inline]
    pub(crate) fn set(&mut self, slot: u32, when: Option<ClockTime>) {
        let (index, at) = (slot as usize / CHUNK, slot as usize % CHUNK);
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || None);
        }
        let chunk = self.chunks[index].get_or_insert_with(|| SlotTimesChunk {
            times: Box::new([NO_TIME; CHUNK]),
            len: 0,
        });
        // Times in the far future are all alike.
        let time = when.map_or(NO_TIME, |when| {
            (when.at.min(u64::MAX >> 2) + 1) << 1 | u64::from(when.clock == WhichClock::Wall)
        });
        let was = std::mem::replace(&mut chunk.times[at], time);
        let (is, was) = (usize::from(time != NO_TIME), usize::from(was != NO_TIME));
        chunk.len = chunk.len + is as u32 - was as u32;
        self.len = self.len + is - was;
        if chunk.len == 0 {
            self.chunks[index] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_found_on_either_clock() {
        let mut times = SlotTimes::default();
        for (slot, clock) in [(0, WhichClock::Steady), (7_000, WhichClock::Wall)] {
            for at in [0, 1, 1_700_000_000_000] {
                times.set(slot, Some(ClockTime { at, clock }));
                assert_eq!(times.get(slot), Some(ClockTime { at, clock }));
            }
        }
        assert_eq!(times.get(1), None);
        times.set(0, None);
        times.set(7_000, None);
        assert!(times.chunks.iter().all(Option::is_none));
    }
}
