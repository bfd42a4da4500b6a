//! Maximum capabilities of a broker that speaks this version of the protocol. A broker declares its own in its welcome;
//! a client that is not connected yet has nothing else to rely on.

use std::sync::LazyLock;
use std::time::Duration;

use penstock_message::{
    Capabilities, Dedupe, Durability, HIGHEST_PRIORITY, JOIN_CAP, LeaseLife, LimitSupport,
    Priorities, Settlement,
};

static ON_DISK: LazyLock<Capabilities> = LazyLock::new(|| {
    let mut on_disk = Capabilities::NOTHING;
    on_disk.engine = format!("penstock {}, journal on disk", env!("CARGO_PKG_VERSION"));
    on_disk.highest_durability = Durability::Disk;
    on_disk.settlement = Settlement::OneStep;
    on_disk.fencing = true;
    on_disk.dedupe = Dedupe::Session;
    on_disk.lease = LeaseLife::Session;
    on_disk.delays = Some(Duration::from_millis(1));
    on_disk.priorities = Priorities::Strict(HIGHEST_PRIORITY + 1);
    on_disk.keeps_place = true;
    on_disk.values = true;
    on_disk.keys = true;
    on_disk.joins = true;
    on_disk.max_group = JOIN_CAP;
    on_disk.pending = true;
    on_disk.purge = true;
    on_disk.pause = true;
    on_disk.limits = LimitSupport::Live;
    on_disk.inspect = true;
    on_disk.failed_jobs = true;
    on_disk.cancel_waiting = true;
    on_disk.cancel_running = true;
    on_disk.tasks_of_consumers = true;
    on_disk.fair_flows = true;
    on_disk.steady_clock = true;
    on_disk.workflows = true;
    on_disk.claims = true;
    on_disk.debounce = true;
    on_disk.schedules = true;
    on_disk.progress = true;
    on_disk.asks = true;
    on_disk
});

static IN_MEMORY: LazyLock<Capabilities> = LazyLock::new(|| {
    let mut in_memory = ON_DISK.clone();
    in_memory.engine = format!("penstock {}, journal in memory", env!("CARGO_PKG_VERSION"));
    in_memory.highest_durability = Durability::None;
    in_memory.is_double = true;
    in_memory.movable_clock = true;
    in_memory
});

/// Returns the capabilities of a broker with its journal on disk.
pub fn on_disk() -> &'static Capabilities {
    &ON_DISK
}

/// Returns the capabilities of the broker of `memory:`, a double for tests.
pub fn in_memory() -> &'static Capabilities {
    &IN_MEMORY
}
