//! Encodes orders to running jobs: the supervisor's request, as one word of shared memory.
//!
//! ```text
//!      63          32 31       22 21                  2 1    0
//!     ┌──────────────┬───────────┬─────────────────────┬──────┐
//!     │ sequence  32 │ index  10 │                   0 │ what │
//!     └──────────────┴───────────┴─────────────────────┴──────┘
//! ```
//!
//! The word names the job by its packet's sequence number and its index in the packet. So an order to a job
//! that has ended reaches no other job, however late the child reads it.

use penstock_faults::planted;

/// Order to a running job; each overrides those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Order {
    /// The soft limit has passed: the job may clean up.
    Soft = 1,
    /// The job was cancelled.
    Cancel = 2,
    /// The time limit has passed.
    Hard = 3,
}

impl Order {
    pub fn from_bits(bits: u64) -> Option<Self> {
        match bits & 3 {
            1 => Some(Self::Soft),
            2 => Some(Self::Cancel),
            3 => Some(Self::Hard),
            _ => None,
        }
    }
}

/// Job of a packet that is out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobAt {
    pub sequence: u32,
    pub index: usize,
}

impl JobAt {
    /// Returns the word of an order to this job; `None` encodes no order.
    pub fn word(self, order: Option<Order>) -> u64 {
        let what = order.map_or(0, |order| order as u64);
        u64::from(self.sequence) << 32 | (self.index as u64 & 0x3ff) << 22 | what
    }

    /// Returns the order in a word, if it addresses this job.
    pub fn order_in(self, word: u64) -> Option<Order> {
        let is_about_it = match planted!("order-without-index") {
            true => (word >> 32) as u32 == self.sequence,
            false => word & !3 == self.word(None),
        };
        Order::from_bits(word).filter(|_| is_about_it)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    pub(crate) fn an_order_is_for_one_job_alone() {
        let job = |sequence, index| JobAt { sequence, index };
        for order in [Order::Soft, Order::Cancel, Order::Hard] {
            let word = job(7, 255).word(Some(order));
            assert_eq!(job(7, 255).order_in(word), Some(order));
            assert_eq!(job(7, 254).order_in(word), None);
            assert_eq!(job(8, 255).order_in(word), None);
            assert_eq!(job(u32::MAX, 255).order_in(word), None);
        }
        assert_eq!(job(0, 0).order_in(0), None, "there is none");
        assert!(Order::Soft < Order::Cancel && Order::Cancel < Order::Hard);
    }
}
