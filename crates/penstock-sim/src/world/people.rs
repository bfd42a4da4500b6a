//! Actions of clients, and the faults that they encounter.

use penstock_broker::ConnId;

use super::World;
use crate::client::Stage;
use crate::model::Verdict;

/// Maximum number of running jobs that a client sees, to cancel one.
const RUNNING_SEEN: usize = 8;

impl World<'_> {
    pub(super) fn client_acts(&mut self) -> Verdict {
        let index = self.rng.below(self.seats.len() as u64) as usize;
        match self.seats[index].client.stage() {
            Stage::Offline => return self.connect(index),
            Stage::Open => {
                let time = self.time();
                let running = self.checker.model.running(RUNNING_SEEN);
                self.seats[index].client.sees_running(running);
                self.seats[index].client.act(&mut self.rng, time);
                self.let_speak(index);
            }
            // A program does not wait for its connection before it sends a request.
            Stage::Greeting => {}
            Stage::Dead => {
                if self.rng.one_in(8) {
                    self.say(|| format!("client {index} is a new one"));
                    self.seats[index].client = self.new_client(index);
                    self.seats[index].conn = None;
                }
            }
        }
        Ok(())
    }

    pub(super) fn client_loses_connection(&mut self) -> Verdict {
        let index = self.rng.below(self.seats.len() as u64) as usize;
        let seat = &mut self.seats[index];
        let Some(conn) = seat.conn else {
            return Ok(());
        };
        match self.rng.below(6) {
            // The client disconnects cleanly.
            0 if seat.client.stage() == Stage::Open => {
                if let Some(wild) = seat.client.as_wild() {
                    wild.say_goodbye();
                }
                self.let_speak(index);
                self.hang_up(index, conn, false);
            }
            // The broker learns of this much later than of the next connection.
            1 => {
                self.say(|| format!("client {index} connects again"));
                self.seats[index].client.disconnected();
                return self.connect(index);
            }
            // From now on, bytes are lost silently in one or both directions.
            2 | 3 => {
                let (to_broker, to_client) = match self.rng.below(3) {
                    0 => (false, false),
                    1 => (true, false),
                    _ => (false, true),
                };
                self.say(|| format!("client {index}: to the broker {to_broker}, back {to_client}"));
                if let Some(link) = self.links.get_mut(&conn) {
                    link.breaks(to_broker, to_client);
                }
            }
            _ => {
                let in_flight_is_lost = self.rng.bool();
                self.hang_up(index, conn, in_flight_is_lost);
            }
        }
        Ok(())
    }

    pub(super) fn hang_up_unless(&mut self, goes_on: bool, index: usize) {
        if !goes_on && let Some(conn) = self.seats[index].conn {
            self.hang_up(index, conn, false);
        }
    }

    pub(super) fn hang_up(&mut self, index: usize, conn: ConnId, in_flight_is_lost: bool) {
        self.say(|| format!("client {index} hangs up"));
        self.seats[index].client.disconnected();
        self.seats[index].conn = None;
        if let Some(link) = self.links.get_mut(&conn) {
            link.client_has_closed = true;
            link.to_client.clear();
            if in_flight_is_lost {
                link.to_broker.clear();
            }
            if link.broker_has_closed {
                self.links.remove(&conn);
            }
        }
    }

    pub(super) fn client_dies(&mut self) -> Verdict {
        // One client must survive to see the end.
        let index = 1 + self.rng.below(self.seats.len() as u64 - 1) as usize;
        self.say(|| format!("client {index} dies"));
        if let Some(conn) = self.seats[index].conn {
            // Half of the time there is no notice: the socket just stays silent.
            if self.rng.bool() {
                self.hang_up(index, conn, true);
            }
        }
        self.seats[index].client.die();
        Ok(())
    }
}
