//! Keeps the planted bug and the likelihood of each point. Both belong to one thread, because a simulated run
//! is one thread.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::table::{PLANTS, POINTS};

thread_local! {
    static PLANTED: Cell<usize> = const { Cell::new(usize::MAX) };
    static LIKELY: Cell<Points> = const { Cell::new(Points::NONE) };
}

/// Likelihood of each point in this run.
#[derive(Clone, Copy, Debug)]
pub struct Points {
    /// Bitmap of the points that take part.
    enabled: u32,
    /// Average number of decisions per positive one.
    one_in: u64,
    state: u64,
}

impl Points {
    pub const NONE: Self = Self {
        enabled: 0,
        one_in: 1,
        state: 0,
    };

    /// Seeds the points of this thread from now on.
    pub fn begin(seed: u64, enabled: u32, one_in: u64) {
        LIKELY.set(Self {
            enabled,
            one_in,
            state: seed,
        });
    }

    /// Plants only the bug of this name in this thread from now on. Returns false if there is none.
    pub fn plant(name: Option<&str>) -> bool {
        let index = name.map(|name| PLANTS.iter().position(|plant| plant.name == name));
        PLANTED.set(index.flatten().unwrap_or(usize::MAX));
        index != Some(None)
    }

    fn draw(&mut self, point: usize) -> bool {
        if self.enabled >> point & 1 == 0 {
            return false;
        }
        // A linear congruential generator (Knuth's MMIX). Its high bits are good enough for decisions.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.state >> 33).is_multiple_of(self.one_in)
    }
}

/// Whether this test fails while the bug is planted. Other threads are not affected by the bug.
pub fn is_found_by(name: &str, test: impl FnOnce()) -> bool {
    assert!(Points::plant(Some(name)), "{name} is not in the table");
    let result = catch_unwind(AssertUnwindSafe(test));
    Points::plant(None);
    result.is_err()
}

pub fn is_planted(plant: usize) -> bool {
    PLANTED.get() == plant
}

pub fn is_likely(point: usize) -> bool {
    let mut points = LIKELY.get();
    let answer = points.draw(point);
    LIKELY.set(points);
    answer
}

/// Returns the index of a name in the table. A name that is not there does not compile.
pub const fn plant(name: &str) -> usize {
    let mut index = 0;
    while index < PLANTS.len() {
        if is_same(PLANTS[index].name, name) {
            return index;
        }
        index += 1;
    }
    panic!("this bug is not in the table")
}

pub const fn point(name: &str) -> usize {
    let mut index = 0;
    while index < POINTS.len() {
        if is_same(POINTS[index].0, name) {
            return index;
        }
        index += 1;
    }
    panic!("this point is not in the table")
}

const fn is_same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut index = 0;
    while index < one.len() && index < other.len() {
        if one[index] != other[index] {
            return false;
        }
        index += 1;
    }
    one.len() == other.len()
}
