//! Checks that ids, keys and names chosen by a hostile client do not slow down the tables.
//!
//! In an earlier version, 40,000 ids whose first eight bytes are a constant of `FxHash` all had the same hash. Each
//! publish looked at every earlier id, and the broker answered nobody for seconds.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hash};

use bytes::Bytes;
use hashbrown::HashTable;
use penstock_message::{Key, MessageId, SeededState};
use rustc_hash::FxBuildHasher;

use crate::messages::shared_heads::SharedHead;
use crate::table::interner::Interner;
use crate::table::slot_index::SlotIndex;
use crate::{Broker, BrokerOptions, Now, Recovery};

const COUNT: usize = 40_000;
const SEED: u64 = 0x0123_4567_89ab_cdef;

/// Constant of `rustc-hash`, which multiplies the parts of the last 16 bytes, xored with its first two constants, and
/// those of each earlier 16 bytes, xored with its third.
const FX_FIRST: u64 = 0x243f_6a88_85a3_08d3;
const FX_THIRD: u64 = 0xa409_3822_299f_31d0;

fn numbered(index: usize, salt: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&salt.to_le_bytes());
    bytes[8..].copy_from_slice(
        &(index as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .to_le_bytes(),
    );
    bytes
}

fn chosen_ids() -> Vec<[u8; 16]> {
    (0..COUNT).map(|index| numbered(index, FX_FIRST)).collect()
}

fn random_ids() -> Vec<[u8; 16]> {
    let random = SeededState::new(1);
    let half = |index: usize, part: u8| random.hash_one((index, part)).to_le_bytes();
    (0..COUNT)
        .map(|index| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&half(index, 0));
            id[8..].copy_from_slice(&half(index, 1));
            id
        })
        .collect()
}

/// Returns colliding names. Names must be text, and the constants are not. But the first block of 16 bytes determines a
/// factor of the third block. If that factor is text, a third block that begins with it makes the product zero,
/// whatever follows.
fn chosen_names() -> Vec<String> {
    let fold = |one: u64, other: u64| {
        let product = u128::from(one) * u128::from(other);
        product as u64 ^ (product >> 64) as u64
    };
    let (first, left) = (0_u64..)
        .find_map(|tried| {
            let block = format!("{tried:016}");
            let word = |at: usize| {
                u64::from_le_bytes(
                    block.as_bytes()[at..at + 8]
                        .try_into()
                        .expect("eight bytes"),
                )
            };
            let left = fold(FX_FIRST ^ word(0), FX_THIRD ^ word(8));
            let left = String::from_utf8(left.to_le_bytes().to_vec()).ok()?;
            Some((block, left))
        })
        .expect("one in a few hundred blocks leaves text");
    (0..COUNT)
        .map(|index| format!("{first}{:016}{left}{index:08}{:016}", 0, 0))
        .collect()
}

fn random_names() -> Vec<String> {
    random_ids()
        .into_iter()
        .map(|id| MessageId(id).to_string().repeat(2)[..64].to_owned())
        .collect()
}

/// Returns colliding heads. Clients choose attempts and times to live, and one can undo the other's effect on an
/// unseeded hash.
fn chosen_heads() -> Vec<SharedHead> {
    const K: u64 = 0xf135_7aea_2e62_a9c5;
    let undone = |attempt: u32| 0_u64.wrapping_sub(K.wrapping_mul(K).wrapping_mul(attempt.into()));
    (0..COUNT as u32)
        .map(|attempt| shared_head(attempt, undone(attempt)))
        .collect()
}

fn random_heads() -> Vec<SharedHead> {
    let random = SeededState::new(2);
    (0..COUNT as u32)
        .map(|attempt| shared_head(attempt, random.hash_one(attempt)))
        .collect()
}

fn shared_head(attempt: u32, result_ttl_ms: u64) -> SharedHead {
    SharedHead {
        queue: 1,
        task: Interner::default().intern("task"),
        priority: 4,
        max_deliveries: 3,
        crashes: 0,
        attempt,
        generation: 0,
        attempts_before: 0,
        result_ttl_ms: Some(result_ttl_ms),
    }
}

/// Counts the comparisons that a table with this hash needs to insert all of these and find each once.
fn comparisons<T: Hash + Eq>(all: &[T]) -> usize {
    let hashing = SeededState::new(SEED);
    let compared = Cell::new(0);
    let mut table = HashTable::new();
    for (index, one) in all.iter().enumerate() {
        let hash = hashing.hash_one(one);
        for is_there in [false, true] {
            let is_it = |other: &usize| {
                compared.set(compared.get() + 1);
                all[*other] == *one
            };
            assert_eq!(table.find(hash, is_it).is_some(), is_there);
            if !is_there {
                table.insert_unique(hash, index, |other| hashing.hash_one(&all[*other]));
            }
        }
    }
    compared.get()
}

/// Counts the comparisons of the index of messages and values, likewise.
fn index_comparisons<T: Hash + Eq>(all: &[T]) -> usize {
    let compared = Cell::new(0);
    let mut index = SlotIndex::new(SeededState::new(SEED));
    for (slot, one) in all.iter().enumerate() {
        let hash = index.hash(one);
        for is_there in [false, true] {
            let is_it = |other: u32| {
                compared.set(compared.get() + 1);
                all[other as usize] == *one
            };
            assert_eq!(index.find(hash, is_it).is_some(), is_there);
            if !is_there {
                index.insert(hash, slot as u32);
            }
        }
    }
    compared.get()
}

/// Checks that `chosen` collide without a seed, and cost the same as `random` with one.
fn assert_no_worse<T: Hash + Eq>(what: &str, chosen: &[T], random: &[T]) {
    let hashes: BTreeSet<u64> = chosen
        .iter()
        .map(|one| FxBuildHasher.hash_one(one))
        .collect();
    assert_eq!(
        hashes.len(),
        1,
        "{what}: they were to have one unseeded hash"
    );
    // Each is compared once when it is found; one in eight is also compared with another that has the same tag.
    let few = COUNT..COUNT * 5 / 4;
    for (table, of_chosen, of_random) in [
        ("a table", comparisons(chosen), comparisons(random)),
        (
            "an index",
            index_comparisons(chosen),
            index_comparisons(random),
        ),
    ] {
        assert!(
            few.contains(&of_chosen) && few.contains(&of_random),
            "{what} in {table}: {of_chosen} comparisons of chosen ones, {of_random} of random ones"
        );
    }
}

#[test]
fn chosen_ids_keys_names_and_heads_cost_the_same_as_random_ones() {
    let ids = |all: Vec<[u8; 16]>| all.into_iter().map(MessageId).collect::<Vec<_>>();
    let results = |all| ids(all).into_iter().map(Key::Result).collect::<Vec<_>>();
    let named = |id: [u8; 16]| Key::Named(Bytes::copy_from_slice(&id));
    let keys = |all: Vec<[u8; 16]>| all.into_iter().map(named).collect::<Vec<_>>();
    assert_no_worse("ids", &ids(chosen_ids()), &ids(random_ids()));
    assert_no_worse("results", &results(chosen_ids()), &results(random_ids()));
    assert_no_worse("keys", &keys(chosen_ids()), &keys(random_ids()));
    assert_no_worse("names", &chosen_names(), &random_names());
    assert_no_worse("shared heads", &chosen_heads(), &random_heads());
}

#[test]
fn every_table_that_clients_choose_keys_of_has_the_seed_of_the_broker() {
    let now = Now {
        mono_ms: 0,
        wall_ms: 0,
        boot: None,
    };
    for hash_seed in [0, SEED] {
        let options = BrokerOptions {
            hash_seed,
            ..BrokerOptions::default()
        };
        let Broker {
            state, checking, ..
        } = Recovery::new(options).finish(now, 1);
        let tables = [
            state.names.hashing(),
            state.messages.hashing(),
            state.messages.heads_hashing(),
            state.messages.extras.hashing(),
            state.sessions.hashing(),
            checking.expect("nothing is being checked").hashing(),
        ]
        .into_iter()
        .chain(state.keys.hashing())
        .chain(state.joins.hashing())
        .chain([
            state.workflows.hashing(),
            state.schedules.hashing(),
            state.progress.hashing(),
        ]);
        for (index, hashing) in tables.enumerate() {
            assert_eq!(hashing, SeededState::new(hash_seed), "table {index}");
        }
    }
}
