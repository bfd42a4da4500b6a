//! Draws message ids: one seed of the system for each process, then a fast generator.

use std::sync::Mutex;
use std::time::SystemTime;

use penstock_message::{IdSource, MessageId};

struct Generator {
    /// Process that the state belongs to: a forked child must not repeat its parent's ids.
    pid: u32,
    state: [u64; 4],
}

static GENERATOR: Mutex<Generator> = Mutex::new(Generator {
    pid: 0,
    state: [0; 4],
});

impl Generator {
    fn seed(&mut self, pid: u32) -> Result<(), getrandom::Error> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed)?;
        for (word, bytes) in self.state.iter_mut().zip(seed.chunks_exact(8)) {
            *word = bytes
                .iter()
                .fold(0, |word, byte| word << 8 | u64::from(*byte));
        }
        self.pid = pid;
        Ok(())
    }

    /// Returns the next number of xoshiro256++, by David Blackman and Sebastiano Vigna.
    fn next(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let drawn = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        drawn
    }
}

/// Two bits of a join's id, in its last byte that is not a member's, that say what the join's value is made of: a list of
/// its members' (0), the only member's (1), theirs by name (2), or an empty list (3). A reader of a value knows nothing
/// else of the join that it came from.
const KIND: (usize, u8) = (12, 3);

/// Draws the id of a join.
pub(crate) fn draw_join(kind: u8) -> Result<MessageId, getrandom::Error> {
    let mut join = draw(1)?[0].join_of();
    let (byte, bits) = KIND;
    join.0[byte] = join.0[byte] & !bits | kind & bits;
    Ok(join)
}

/// Draws this many ids, all of this millisecond.
pub(crate) fn draw(count: usize) -> Result<Vec<MessageId>, getrandom::Error> {
    let mut generator = GENERATOR.lock().unwrap();
    let pid = std::process::id();
    if generator.pid != pid {
        generator.seed(pid)?;
    }
    let unix_ms = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64);
    let mut id = || {
        let mut random = [0; 10];
        random[..8].copy_from_slice(&generator.next().to_le_bytes());
        random[8..].copy_from_slice(&generator.next().to_le_bytes()[..2]);
        MessageId::new(IdSource { unix_ms, random })
    };
    Ok((0..count).map(|_| id()).collect())
}
