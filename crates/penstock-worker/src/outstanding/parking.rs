//! Parks jobs: they wait for other jobs, and their slots are lent.

use super::Outstanding;
use crate::packet::WaitFrame;
use crate::page::steady_ns;
use crate::policy::TaskIndex;

impl Outstanding {
    /// Returns the pool and the task of the packet whose job reports a wait. `None`: the job has ended, or runs
    /// in another child.
    pub fn waiting(&self, child: u32, frame: &WaitFrame) -> Option<(usize, TaskIndex)> {
        let place = usize::from(frame.place);
        let packet = self.packets.get(place)?.as_ref()?;
        let running = self.running(place)?;
        let is_it = packet.sequence == frame.sequence
            && running.child == child
            && running.job.index == usize::from(frame.index);
        is_it.then_some((packet.pool, packet.task))
    }

    /// Returns the time since which the packet's job has been parked, by the clock of [`steady_ns`].
    pub fn parked_since(&self, place: usize) -> Option<u64> {
        self.packets.get(place)?.as_ref()?.parked_ns
    }

    /// Returns the child that has the packet at this place, if its job is parked.
    pub fn owner_of_parked(&self, place: usize) -> Option<u32> {
        self.parked_since(place).and_then(|_| self.owner(place))
    }

    /// Returns how many packets of this child have a parked job.
    pub fn parked_of(&self, child: u32) -> usize {
        let places = self.places_of(Some(child)).into_iter();
        places
            .filter(|place| self.parked_since(*place).is_some())
            .count()
    }

    /// Parks the job of a packet: it no longer has a slot, and its clock stops.
    pub fn park(&mut self, place: usize) {
        let Some(packet) = &mut self.packets[place] else {
            return;
        };
        if packet.parked_ns.replace(steady_ns()).is_some() {
            return;
        }
        packet.still_ticks = 0;
        packet.begun_at_tick = None;
        let pool = &mut self.pools[packet.pool];
        pool.stuck -= usize::from(std::mem::replace(&mut packet.is_stuck, false));
        match pool.watched.has(place) {
            true => pool.watched.remove(place),
            false => pool.settled -= 1,
        }
    }

    /// Resumes the parked job of a packet. Returns its pool and its task; `None` if it was not parked.
    pub fn unpark(&mut self, place: usize) -> Option<(usize, TaskIndex)> {
        let packet = self.packets.get_mut(place)?.as_mut()?;
        let since = packet.parked_ns?;
        let (pool, task, has_limit) = (packet.pool, packet.task, packet.limit.is_some());
        self.watch(place, pool);
        let cell = self.pages.claim(place);
        cell.add_to_since(steady_ns().saturating_sub(since));
        if has_limit {
            self.alarms.by(place, std::time::Instant::now());
        }
        Some((pool, task))
    }

    /// Returns the places of a pool's unclaimed packets.
    pub fn unclaimed(&self, pool: usize) -> Vec<usize> {
        let watched = self.pools[pool].watched.iter();
        watched
            .filter(|place| self.pages.claim(*place).read().owner.is_none())
            .collect()
    }
}
