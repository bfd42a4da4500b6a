//! End of a run: all faults stop, everything drains and nothing is left; or one bit of it rots.

use std::collections::BTreeMap;

use penstock_journal::Storage;
use penstock_message::{Key, KeyState};
use penstock_server::Engine;

use super::{Seat, World};
use crate::checker::Crash;
use crate::client::Stage;
use crate::model::{State, Verdict};

/// Time without a fault after which everything must have ended, except messages that wait for a wall clock that was set
/// back. A session whose client has died is forgotten later; its leases end earlier.
const PATIENCE_MS: u64 = 300_000;

impl World<'_> {
    /// Ends all faults. Living clients come back and finish the work, and nothing may be left.
    pub(super) fn heal(&mut self) -> Verdict {
        self.say(|| "all faults end".to_string());
        self.healed = true;
        self.storage.forget_faults();
        if self.plan.clock_jumps > 0 {
            // A job that is due at a time of day may be due in thirty years; after this it is.
            let ahead_ms = 31 * 365 * 24 * 3_600_000;
            let by_ms = self.wall_farthest_ahead_ms - self.wall_ahead_ms + ahead_ms;
            self.wall_ahead_ms += by_ms;
            self.checker.wall_was_set(by_ms.unsigned_abs());
            self.tick()?;
        }
        let began_ms = self.now_ms;
        let mut pause_ms = 50;
        let patience_ms = PATIENCE_MS + self.wall_was_set_by_ms.min(4 * 3_600_000);
        while self.now_ms < began_ms + patience_ms {
            self.steps += 1;
            for index in 0..self.seats.len() {
                match self.seats[index].client.stage() {
                    Stage::Offline => self.connect(index)?,
                    Stage::Open => {
                        let paused = &self.checker.model.paused;
                        // A client may have resent an order that pauses a queue.
                        if index == 0 && !paused.is_empty() && self.seats[0].client.is_idle() {
                            let paused = paused.clone().into_iter();
                            if let Some(wild) = self.seats[0].client.as_wild() {
                                wild.resume(paused, &mut self.rng);
                            }
                        }
                        let schedules = &self.checker.model.schedules;
                        if index == 0 && !schedules.is_empty() && self.seats[0].client.is_idle() {
                            let names = schedules.keys().cloned().collect();
                            if let Some(wild) = self.seats[0].client.as_wild() {
                                wild.unschedule(names, &mut self.rng);
                            }
                        }
                        let time = self.time();
                        self.seats[index].client.finish(&mut self.rng, time);
                        self.let_speak(index);
                    }
                    Stage::Greeting | Stage::Dead => {}
                }
            }
            let before = self.checker.counts.applied;
            self.pass(101 + pause_ms)?;
            if let Some(life) = &self.broker {
                self.checker.look_at_failed(life.engine.broker())?;
            }
            if self.is_drained() {
                // Doubtful states may still produce something.
                self.pass(60_000)?;
                if self.is_drained() {
                    return self.judge();
                }
            }
            // The remaining jobs wait for a future time.
            pause_ms = match self.checker.counts.applied == before {
                true => (pause_ms * 2).min(30_000),
                false => 50,
            };
        }
        self.checker.drained()?;
        if self.checker.model.clock_is_doubtful {
            // Its countdown is hours behind, and any client that waits for it waits that long.
            return Ok(());
        }
        Err("somebody still waits for something in the end".to_string())
    }

    pub(super) fn is_drained(&self) -> bool {
        let is_done = |seat: &Seat| seat.client.is_idle() || seat.client.stage() == Stage::Dead;
        self.seats.iter().all(is_done)
            && self.checker.model.paused.is_empty()
            && self.checker.model.schedules.is_empty()
            && self.checker.drained().is_ok()
    }

    /// Requests the result of everything, then checks that nothing is left behind.
    pub(super) fn judge(&mut self) -> Verdict {
        let ids: Vec<Key> = self
            .checker
            .model
            .items
            .iter()
            .map(|item| Key::Result(item.message.id))
            .collect();
        if let Some(wild) = self.seats[0].client.as_wild() {
            wild.watch(ids.clone());
        }
        self.let_speak(0);
        self.pass(1_000)?;
        let told = match self.seats[0].client.as_wild() {
            Some(wild) => std::mem::take(&mut wild.told),
            None => Vec::new(),
        };
        let told: BTreeMap<Key, KeyState> = told.into_iter().collect();
        // While the disk was full, values without a body may have been dropped.
        let life = self.broker.as_ref();
        let has_evicted = life.is_some_and(|life| life.engine.broker().status().evicted > 0);
        for id in &ids {
            let state = told
                .get(id)
                .ok_or_else(|| format!("no client was told about {id:?}"))?;
            self.checker.result_is_right(id, state, has_evicted)?;
        }
        Ok(())
    }

    /// Disconnects every client, and lets every deadline pass: all counts of the broker return to zero.
    pub(super) fn leave_nothing(&mut self) -> Verdict {
        const TWO_DAYS_MS: u64 = 2 * 24 * 3_600_000;
        const FAILED_KEPT_MS: u64 = 31 * 24 * 3_600_000;
        for index in 0..self.seats.len() {
            if let Some(conn) = self.seats[index].conn {
                self.hang_up(index, conn, false);
            }
            self.seats[index].client.die();
        }
        let held = |world: &Self| {
            let held = world.checker.model.items.iter();
            held.filter(|item| matches!(item.state, State::Held(_)))
                .count()
        };
        self.pass(TWO_DAYS_MS)?;
        self.pass(FAILED_KEPT_MS)?;
        let held = held(self);
        let Some(life) = &self.broker else {
            return Err("the broker has ended by itself".to_string());
        };
        life.engine.broker().assert_consistent();
        life.engine.broker().assert_no_circle_of_waits();
        match self.checker.model.clock_is_doubtful {
            true => Ok(()),
            false => self.checker.nothing_is_left(life.engine.broker(), held),
        }
    }

    /// Flips a bit of the journal at the very end, while no broker runs. The next start must refuse it, or find
    /// everything that was confirmed.
    pub(super) fn rot(&mut self) -> Verdict {
        self.broker = None;
        self.storage = self.storage.kill();
        let files = self.storage.list().map_err(|error| error.to_string())?;
        let segments = files.iter().filter(|name| name.ends_with(".segment"));
        let segments: Vec<String> = segments.cloned().collect();
        // Usually the last one, which has no successor to prove that it is complete.
        let behind = self.rng.below(4).saturating_sub(2) as usize;
        let name = &segments[(segments.len() - 1).saturating_sub(behind)];
        let mut bytes = self.storage.contents(name).unwrap_or_default();
        let used: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        let at = used[self.rng.below(used.len() as u64) as usize];
        bytes[at] ^= 1 << self.rng.below(8);
        self.storage.corrupt(name, bytes);
        self.say(|| format!("a bit rots at byte {at} of {name}"));
        let now = self.now();
        match Engine::open(self.storage.clone(), self.options.clone(), || now) {
            Ok((engine, _, report)) => {
                let (crash, time) = (Crash::Killed, self.time());
                let through = report.through;
                self.checker
                    .recovered(crash, engine.broker(), time, through)
            }
            Err(error) => {
                self.say(|| format!("it is refused: {error}"));
                Ok(())
            }
        }
    }
}
