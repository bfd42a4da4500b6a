//! Cancels jobs that this worker holds. The broker asks for it, and ends the jobs once they are released.
//!
//! ```text
//!     waits here, or in a packet behind another     released at once: it never began
//!     runs                                          ordered to stop, see `orders.rs`
//! ```

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use penstock_message::{CancelOrder, Lease};

use super::Supervisor;
use super::orders::OrderResult;
use crate::order::Order;
use crate::policy::PacketEnd;

impl Supervisor {
    /// Stops these jobs. An order may be repeated after each reconnect.
    pub(super) fn cancel(&mut self, orders: Vec<CancelOrder>, now: Instant) {
        let orders: HashMap<Lease, CancelOrder> = orders
            .into_iter()
            .map(|order| (order.lease, order))
            .collect();
        let leases: HashSet<Lease> = orders.keys().copied().collect();
        // The jobs of their packets that have not begun go back to the policy, which finds them there.
        for place in self.outstanding.places_with(&leases) {
            self.take_back(place, PacketEnd::TakenBack);
        }
        for pool in &mut self.pools {
            let waiting = pool.policy.retain(|job| !leases.contains(&job.lease));
            self.settlements.give_back(waiting);
        }
        for (lease, order) in orders {
            let told = self.order(&lease, Order::Cancel, now);
            if told == OrderResult::Running && order.kill {
                self.hasten(&lease, now);
            }
        }
    }
}
