//! Draws message ids: one system seed per process, then a fast generator.

use std::sync::Mutex;
use std::time::SystemTime;

use penstock_message::{IdSource, MessageId};

struct Generator {
    /// Process that the numbers belong to: a forked child must not repeat its parent's ids.
    pid: u32,
    numbers: Numbers,
}

static GENERATOR: Mutex<Generator> = Mutex::new(Generator {
    pid: 0,
    numbers: Numbers([0; 4]),
});

/// Numbers generated from a seed.
struct Numbers([u64; 4]);

impl Numbers {
    fn new(seed: &[u8; 32]) -> Self {
        let mut state = [0; 4];
        for (word, bytes) in state.iter_mut().zip(seed.chunks_exact(8)) {
            *word = bytes
                .iter()
                .fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        Self(state)
    }

    /// Returns the next number of xoshiro256++, by David Blackman and Sebastiano Vigna.
    fn next(&mut self) -> u64 {
        let [a, b, c, d] = self.0;
        let drawn = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.0 = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        drawn
    }

    fn next_id(&mut self, unix_ms: u64) -> MessageId {
        let mut random = [0; 10];
        random[..8].copy_from_slice(&self.next().to_le_bytes());
        random[8..].copy_from_slice(&self.next().to_le_bytes()[..2]);
        MessageId::new(IdSource { unix_ms, random })
    }
}

/// Ids for everything that a job sends: drawn from a seed, so that another run of the job draws the same ones.
pub(crate) struct Derived {
    unix_ms: u64,
    numbers: Numbers,
}

impl Derived {
    /// Creates the generator; its ids have the timestamp of the job's own.
    pub(crate) fn new(job: MessageId, seed: &[u8; 32]) -> Self {
        let time = job.0[..6].iter();
        Self {
            unix_ms: time.fold(0, |ms, byte| ms << 8 | u64::from(*byte)),
            numbers: Numbers::new(seed),
        }
    }

    pub(crate) fn draw(&mut self) -> MessageId {
        self.numbers.next_id(self.unix_ms)
    }
}

/// Position and mask of three bits of a join's id, in the last byte that is not the member index. Two of them give the
/// form of the join's value: a list of its members' values (0), the value of the only member (1), a dict by name (2), or
/// an empty list (3). A reader of a value knows nothing else about its join.
const KIND: (usize, u8) = (12, 7);

/// Bits of the form, and the form of a join whose value is that of its only member.
const FORM: u8 = 3;
const WRAPS: u8 = 1;

/// Set for a group to which its members may add others, and for a join that wraps one of its members.
const MAY_GROW: u8 = 4;

/// Turns an id drawn for a job into the id of a join.
pub(crate) fn join(drawn: MessageId, kind: u8) -> MessageId {
    let mut join = drawn.join_of();
    let (byte, bits) = KIND;
    join.0[byte] = join.0[byte] & !bits | kind & bits;
    join
}

/// Returns whether the group of a member is the join around its own; `None` if its members can't add others.
pub(crate) fn grows_outside(member: MessageId) -> Option<bool> {
    let kind = member.0[KIND.0];
    (kind & MAY_GROW != 0).then_some(kind & FORM == WRAPS)
}

/// Draws this many ids, all with the current millisecond.
pub(crate) fn draw(count: usize) -> Result<Vec<MessageId>, getrandom::Error> {
    let mut generator = GENERATOR.lock().unwrap();
    let pid = std::process::id();
    if generator.pid != pid {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed)?;
        generator.numbers = Numbers::new(&seed);
        generator.pid = pid;
    }
    let unix_ms = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64);
    let numbers = &mut generator.numbers;
    Ok((0..count).map(|_| numbers.next_id(unix_ms)).collect())
}
