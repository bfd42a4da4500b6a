//! Advances time on two clocks, and runs the events that are due.

use penstock_broker::{Boot, ConnId, Now};

use super::life::Life;
use super::{BEGINNING_MS, World};
use crate::model::{Time, Verdict};
use crate::network::Link;

/// Maximum number of rounds until everybody is calm at one time. A broker that is never done with something, such as a
/// purge, would never come to rest.
const ROUNDS_TO_CALM: u32 = 100_000;

impl World<'_> {
    pub(super) fn wall_ms(&self) -> u64 {
        (BEGINNING_MS + self.now_ms).saturating_add_signed(self.wall_ahead_ms)
    }

    pub(super) fn time(&self) -> Time {
        Time {
            steady: BEGINNING_MS + self.now_ms,
            wall: self.wall_ms(),
        }
    }

    pub(super) fn now(&self) -> Now {
        let started_ms = self
            .broker
            .as_ref()
            .map_or(self.now_ms, |life| life.started_ms);
        Now {
            mono_ms: self.now_ms - started_ms,
            wall_ms: self.wall_ms(),
            boot: Some(Boot {
                id: [self.boots; 16],
                ms: self.now_ms - self.booted_ms,
            }),
        }
    }

    /// Starts the machine after a power cut.
    pub(super) fn boot(&mut self) {
        self.boots = self.boots.wrapping_add(1);
        self.booted_ms = self.now_ms;
    }

    pub(super) fn tick(&mut self) -> Verdict {
        self.checker.time(self.time());
        // A full disk does not report that it has space again, so it is retried now and then.
        self.prepare_spares();
        let now = self.now();
        if let Some(life) = &mut self.broker {
            life.engine.tick(now);
        }
        self.tend()
    }

    /// Advances the time, and handles each deadline when it is due. During long periods the network and the
    /// disk are calm.
    pub(super) fn pass(&mut self, ms: u64) -> Verdict {
        let until_ms = self.now_ms + ms;
        let is_calm = ms > 100;
        self.say(|| format!("{ms} ms pass"));
        loop {
            if is_calm {
                self.calm_down()?;
            }
            let broker_ms = self.broker.as_mut().and_then(|life| {
                let deadline_ms = life.engine.next_deadline_ms()?;
                Some(life.started_ms + deadline_ms)
            });
            if self.now_ms >= until_ms {
                return Ok(());
            }
            let clients = self
                .seats
                .iter()
                .filter_map(|seat| seat.client.next_deadline_ms());
            let client_ms = clients.min().map(|at| at.saturating_sub(BEGINNING_MS));
            let next_ms = [broker_ms, client_ms].into_iter().flatten().min();
            let next_ms = next_ms.unwrap_or(until_ms);
            self.now_ms = next_ms.max(self.now_ms + 1).min(until_ms);
            let time = self.time();
            for index in 0..self.seats.len() {
                let client = &mut self.seats[index].client;
                let is_due = client
                    .next_deadline_ms()
                    .is_some_and(|at| at <= time.steady);
                if is_due {
                    let goes_on = client.tick(&mut self.rng, time);
                    self.let_speak(index);
                    self.hang_up_unless(goes_on, index);
                }
            }
            if broker_ms.is_some_and(|broker_ms| broker_ms <= self.now_ms) {
                self.tick()?;
            }
        }
    }

    /// Delivers all bytes in transit, and lets the disk finish its work.
    pub(super) fn calm_down(&mut self) -> Verdict {
        for _ in 0..ROUNDS_TO_CALM {
            let conns: Vec<ConnId> = self.links.keys().copied().collect();
            let mut is_still = true;
            for conn in conns {
                if self.links.get(&conn).is_some_and(Link::has_news_for_broker) {
                    is_still = false;
                    self.deliver_to_broker(conn, usize::MAX)?;
                }
                if self.links.get(&conn).is_some_and(Link::has_news_for_client) {
                    is_still = false;
                    self.deliver_to_client(conn, usize::MAX)?;
                }
            }
            if self
                .broker
                .as_ref()
                .is_some_and(|life| life.task.is_some() || life.reads.is_some())
            {
                is_still = false;
                self.disk_works()?;
            }
            // A batch that a fault point has delayed may be due.
            let is_due = |life: &mut Life| {
                let deadline_ms = life.engine.next_deadline_ms();
                deadline_ms.is_some_and(|at_ms| life.started_ms + at_ms <= self.now_ms)
            };
            if self.broker.as_mut().is_some_and(is_due) {
                is_still = false;
                self.tick()?;
            }
            if is_still {
                return self.look_whether_quiet();
            }
            self.heard_at_ms = self.now_ms;
        }
        Err(format!(
            "after {ROUNDS_TO_CALM} rounds at the same time there is still something to do"
        ))
    }

    /// Checks what must hold once nothing has happened for a while.
    fn look_whether_quiet(&mut self) -> Verdict {
        // By then the journal has synced even records that no client waited for.
        if let Some(life) = &self.broker
            && self.now_ms >= self.heard_at_ms + 300
        {
            self.checker.quiet(life.engine.broker())?;
        }
        Ok(())
    }

    /// Draws by how much somebody sets the clock. Smaller changes do not count as steps.
    pub(super) fn clock_step_ms(&mut self) -> u64 {
        200 + match self.rng.below(3) {
            0 => self.rng.below(2_000),
            1 => self.rng.below(60_000),
            _ => self.rng.below(120_000),
        }
    }

    pub(super) fn set_the_wall(&mut self, by_ms: u64) -> Verdict {
        let by_ms = by_ms as i64;
        let by_ms = if self.rng.bool() { by_ms } else { -by_ms };
        self.wall_ahead_ms += by_ms;
        self.wall_farthest_ahead_ms = self.wall_farthest_ahead_ms.max(self.wall_ahead_ms);
        self.wall_was_set_by_ms += by_ms.unsigned_abs();
        self.checker.wall_was_set(by_ms.unsigned_abs());
        self.say(|| format!("the wall's clock is set by {by_ms} ms"));
        self.tick()
    }
}
