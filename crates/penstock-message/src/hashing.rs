//! Hashing of bytes that a client chooses: ids, keys, names.
//!
//! An attacker who knows the hash of a table can choose ids that all fall into one slot, and each look-up then passes
//! all of them. So tables of such bytes hash with a seed that no client knows: the process draws it when it starts. The
//! simulator and the tests fix it, so that each run is the same.
//!
//! A step multiplies two words of 64 bits and folds the 128 bits of the product by xor. One multiplication
//! reads 16 bytes, which is an id. **Both factors depend on the seed.** If one did not, a client would
//! choose the input that makes it zero, and with it every product, whatever the seed of the other:
//!
//! ```text
//!     unseeded                         (low ^ CONSTANT) * (high ^ CONSTANT)    FxHash
//!     with a seeded start              start + the same                        FxHash with a seed
//!     with one seeded factor           (low ^ secret)   * (high ^ CONSTANT)    foldhash::FixedState
//!     here                             (low ^ secret)   * (high ^ secret)
//! ```
//!
//! `foldhash` does the same when both its seeds are drawn, but it takes the second from a `static`, and a process may
//! have several brokers with a seed each.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher};

/// A map whose keys clients choose.
pub type SeededMap<K, V> = HashMap<K, V, SeededState>;
/// A set of bytes that clients choose.
pub type SeededSet<T> = HashSet<T, SeededState>;

/// Makes hashers of one seed. The default has seed 0, which everyone knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeededState {
    start: u64,
    factor: u64,
}

impl SeededState {
    pub fn new(seed: u64) -> Self {
        Self {
            start: scatter(seed),
            factor: scatter(seed.wrapping_add(STEP)),
        }
    }
}

impl Default for SeededState {
    fn default() -> Self {
        Self::new(0)
    }
}

impl BuildHasher for SeededState {
    type Hasher = SeededHasher;

    fn build_hasher(&self) -> SeededHasher {
        SeededHasher {
            state: self.start,
            factor: self.factor,
        }
    }
}

/// Hashes with a secret seed; see the module.
#[derive(Clone, Debug)]
pub struct SeededHasher {
    state: u64,
    factor: u64,
}

impl SeededHasher {
    #[inline]
    fn add(&mut self, low: u64, high: u64) {
        self.state = fold(self.state ^ low, self.factor ^ high);
    }
}

impl Hasher for SeededHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        // The last 16 bytes overlap the ones before, so the length must count as well.
        self.state = self.state.rotate_left(bytes.len() as u32);
        let mut rest = bytes;
        while rest.len() > 16 {
            self.add(word(rest), word(&rest[8..]));
            rest = &rest[16..];
        }
        match bytes.len() {
            0 => {}
            1..=3 => {
                let middle = bytes[bytes.len() / 2];
                let last = bytes[bytes.len() - 1];
                self.add(
                    u64::from(bytes[0]),
                    u64::from(middle) << 8 | u64::from(last),
                );
            }
            4..=7 => self.add(half_word(bytes), half_word(&bytes[bytes.len() - 4..])),
            8..=16 => self.add(word(bytes), word(&bytes[bytes.len() - 8..])),
            _ => {
                let last = &bytes[bytes.len() - 16..];
                self.add(word(last), word(&last[8..]));
            }
        }
    }

    #[inline]
    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u16(&mut self, value: u16) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.add(value, 0);
    }

    /// Hashes lengths and the variants of enums: no table is keyed by them alone, so they need no step of their own.
    #[inline]
    fn write_usize(&mut self, value: usize) {
        self.state = (self.state ^ value as u64).rotate_left(17);
    }

    /// Folds the hash once more: a single product of consecutive numbers has regular bits.
    #[inline]
    fn finish(&self) -> u64 {
        fold(self.state, STEP)
    }
}

#[inline]
fn fold(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn word(bytes: &[u8]) -> u64 {
    let (word, _) = bytes.split_first_chunk().expect("eight bytes");
    u64::from_le_bytes(*word)
}

#[inline]
fn half_word(bytes: &[u8]) -> u64 {
    let (word, _) = bytes.split_first_chunk().expect("four bytes");
    u64::from(u32::from_le_bytes(*word))
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns one number of the SplitMix64 generator: seeds that differ in one bit differ in half of them after it.
fn scatter(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(STEP);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Checks that hashes spread over 65,536 slots, whichever 16 of their bits choose. Of 40,000 random ones, 12,207
    /// pairs share a slot.
    fn assert_spread(what: &str, hashes: impl Iterator<Item = u64>) {
        let hashes: Vec<u64> = hashes.collect();
        assert_eq!(hashes.len(), 40_000);
        for shift in [0, 16, 32, 48] {
            let mut places = vec![0_usize; 1 << 16];
            for hash in &hashes {
                places[(hash >> shift) as usize & 0xffff] += 1;
            }
            let pairs: usize = places
                .iter()
                .map(|count| count * count.saturating_sub(1) / 2)
                .sum();
            assert!(
                pairs < 14_000,
                "{what}: {pairs} pairs share 16 bits above bit {shift}"
            );
        }
    }

    #[test]
    fn inputs_with_a_pattern_spread() {
        for seed in [0, 1, u64::MAX] {
            let state = SeededState::new(seed);
            let numbers = 0..40_000_u64;
            assert_spread("counted", numbers.clone().map(|n| state.hash_one(n)));
            for (before, after) in [(0, 8), (8, 0), (4, 4), (16, 0), (0, 16), (30, 3)] {
                let padded = |n: u64| {
                    let mut bytes = vec![b'a'; before];
                    bytes.extend(n.to_be_bytes());
                    bytes.extend(vec![b'z'; after]);
                    state.hash_one(bytes)
                };
                assert_spread(
                    &format!("{before} bytes, a number, {after} bytes"),
                    numbers.clone().map(padded),
                );
            }
            assert_spread(
                "decimal",
                numbers.clone().map(|n| state.hash_one(n.to_string())),
            );
        }
    }

    #[test]
    fn every_byte_and_every_length_counts() {
        let state = SeededState::new(7);
        let mut seen = BTreeMap::new();
        for length in 0..300 {
            let bytes = vec![b'a'; length];
            // Written without the length that slices write first, like a text.
            let mut hasher = state.build_hasher();
            hasher.write(&bytes);
            if let Some(other) = seen.insert(hasher.finish(), length) {
                panic!("{other} and {length} bytes have one hash");
            }
            for changed in 0..length {
                let mut other = bytes.clone();
                other[changed] ^= 1;
                assert_ne!(
                    state.hash_one(&other),
                    state.hash_one(&bytes),
                    "byte {changed} of {length}"
                );
            }
        }
    }

    #[test]
    fn another_seed_is_another_hash() {
        let id = [7_u8; 16];
        let hashes: HashSet<u64> = (0..10_000)
            .map(|seed| SeededState::new(seed).hash_one(id))
            .collect();
        assert_eq!(hashes.len(), 10_000);
    }
}
