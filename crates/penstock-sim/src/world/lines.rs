//! Delivers bytes in portions, late, or never.

use penstock_broker::ConnId;
use penstock_server::Peer;

use super::World;
use crate::client::Stage;
use crate::model::Verdict;
use crate::network::{Line, Link};
use crate::said::Hearing;

impl World<'_> {
    /// Connects this client, and starts the broker if it is not running.
    pub(super) fn connect(&mut self, index: usize) -> Verdict {
        if self.broker.is_none() {
            self.start()?;
        }
        self.connections += 1;
        let conn = ConnId(self.connections);
        let (now, time) = (self.now(), self.time());
        let line = self.draw_line();
        let Some(life) = &mut self.broker else {
            return Ok(());
        };
        life.engine.opened(now, conn, Peer::Trusted);
        self.links.insert(conn, Link::new(index, line));
        let seat = &mut self.seats[index];
        seat.conn = Some(conn);
        seat.client.connected(time);
        self.let_speak(index);
        Ok(())
    }

    pub(super) fn draw_line(&mut self) -> Line {
        if self.plan.poor_lines == 0 || self.healed || !self.rng.one_in(self.plan.poor_lines) {
            return Line::Good;
        }
        Line::Trickle
    }

    /// Moves a client's bytes onto the line.
    pub(super) fn let_speak(&mut self, index: usize) {
        let time = self.time();
        let seat = &mut self.seats[index];
        let bytes = seat.client.next_bytes(time);
        let Some(link) = seat.conn.and_then(|conn| self.links.get_mut(&conn)) else {
            return;
        };
        if bytes.is_empty() {
            return;
        }
        link.client_sends(&bytes);
        if self.trace.is_some() {
            let mut hearing = Hearing::default();
            hearing.extend(&bytes);
            while let Ok(Some(said)) = hearing.next_said() {
                let words = said.in_words();
                if words != "ping" {
                    self.say(|| format!("client {index} says {words}"));
                }
            }
        }
    }

    pub(super) fn bytes_reach_broker(&mut self) -> Verdict {
        let Some(conn) = self.pick(Link::has_news_for_broker) else {
            return Ok(());
        };
        let bytes = if self.rng.one_in(3) {
            1 + self.rng.below(200)
        } else {
            u64::MAX
        };
        self.deliver_to_broker(conn, bytes as usize)
    }

    pub(super) fn deliver_to_broker(&mut self, conn: ConnId, bytes: usize) -> Verdict {
        self.checker.time(self.time());
        let now = self.now();
        let (Some(life), Some(link)) = (&mut self.broker, self.links.get_mut(&conn)) else {
            return Ok(());
        };
        if !life.engine.accepts_input() && !link.broker_has_closed {
            return Ok(());
        }
        let bytes = bytes.min(link.to_broker.len());
        let bytes: Vec<u8> = link.to_broker.drain(..bytes).collect();
        if !link.broker_has_closed {
            let at_once = match link.line {
                Line::Trickle => 1,
                _ => bytes.len().max(1),
            };
            for bytes in bytes.chunks(at_once) {
                life.engine.received(now, conn, bytes);
                self.checker.heard(conn, bytes, life.engine.broker())?;
            }
        }
        let has_ended = link.client_has_closed && link.reaches_broker();
        if has_ended && link.to_broker.is_empty() {
            if !link.broker_has_closed {
                life.engine.closed(now, conn);
                self.checker.closed(conn)?;
            }
            self.links.remove(&conn);
        }
        self.heard_at_ms = self.now_ms;
        self.tend()
    }

    pub(super) fn bytes_reach_client(&mut self) -> Verdict {
        let Some(conn) = self.pick(Link::has_news_for_client) else {
            return Ok(());
        };
        let bytes = if self.rng.one_in(3) {
            1 + self.rng.below(200)
        } else {
            u64::MAX
        };
        self.deliver_to_client(conn, bytes as usize)
    }

    pub(super) fn deliver_to_client(&mut self, conn: ConnId, bytes: usize) -> Verdict {
        let time = self.time();
        let Some(link) = self.links.get_mut(&conn) else {
            return Ok(());
        };
        let bytes = bytes.min(link.to_client.len());
        let bytes: Vec<u8> = link.to_client.drain(..bytes).collect();
        let at_once = match link.line {
            Line::Trickle => 1,
            _ => bytes.len().max(1),
        };
        let index = link.seat;
        let has_room_again = std::mem::take(&mut link.is_full) && !link.broker_has_closed;
        let has_ended = link.broker_has_closed && link.to_client.is_empty();
        let seat = &mut self.seats[index];
        if seat.conn == Some(conn) && seat.client.stage() != Stage::Dead {
            let mut goes_on = true;
            for bytes in bytes.chunks(at_once) {
                goes_on &= seat.client.hears(&mut self.rng, time, bytes);
            }
            if has_ended {
                seat.client.disconnected();
                seat.conn = None;
            }
            self.let_speak(index);
            self.hang_up_unless(goes_on, index);
        }
        if has_ended {
            self.links.remove(&conn);
        }
        if has_room_again {
            self.transmit(conn)?;
            return self.tend();
        }
        Ok(())
    }

    pub(super) fn pick(&mut self, wanted: impl Fn(&Link) -> bool) -> Option<ConnId> {
        let conns: Vec<ConnId> = self
            .links
            .iter()
            .filter(|(_, link)| wanted(link))
            .map(|(conn, _)| *conn)
            .collect();
        (!conns.is_empty()).then(|| conns[self.rng.below(conns.len() as u64) as usize])
    }
}
