//! Carries bytes between a client and the broker.

use std::collections::VecDeque;

/// Size of a socket's buffer. To the model, bytes that the broker has not sent were not handed out. With a
/// smaller buffer, it would have to allow for the broker's own buffer when a client disconnects.
const BUFFER_BYTES: usize = 16 << 20;

/// Quality of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    Good,
    /// Bytes arrive one at a time.
    Trickle,
    /// The line becomes half-open: bytes in a direction that is `false` are lost silently.
    HalfOpen {
        to_broker: bool,
        to_client: bool,
    },
}

pub struct Link {
    /// Seat of the client.
    pub seat: usize,
    pub line: Line,
    pub to_broker: VecDeque<u8>,
    pub to_client: VecDeque<u8>,
    /// Whether the broker has more bytes for the client than the socket had room for.
    pub is_full: bool,
    pub client_has_closed: bool,
    pub broker_has_closed: bool,
}

impl Link {
    pub fn new(seat: usize, line: Line) -> Self {
        Self {
            seat,
            line,
            to_broker: VecDeque::new(),
            to_client: VecDeque::new(),
            is_full: false,
            client_has_closed: false,
            broker_has_closed: false,
        }
    }

    pub fn has_news_for_broker(&self) -> bool {
        !self.to_broker.is_empty() || self.client_has_closed && self.reaches_broker()
    }

    pub fn has_news_for_client(&self) -> bool {
        !self.client_has_closed
            && (!self.to_client.is_empty() || self.broker_has_closed && self.reaches_client())
    }

    pub fn reaches_broker(&self) -> bool {
        !matches!(
            self.line,
            Line::HalfOpen {
                to_broker: false,
                ..
            }
        )
    }

    pub fn reaches_client(&self) -> bool {
        !matches!(
            self.line,
            Line::HalfOpen {
                to_client: false,
                ..
            }
        )
    }

    /// Breaks the line: from now on only bytes in these directions arrive. A lost direction stays lost.
    pub fn breaks(&mut self, to_broker: bool, to_client: bool) {
        self.line = Line::HalfOpen {
            to_broker: to_broker && self.reaches_broker(),
            to_client: to_client && self.reaches_client(),
        };
    }

    pub fn client_sends(&mut self, bytes: &[u8]) {
        if self.reaches_broker() {
            self.to_broker.extend(bytes);
        }
    }

    /// Returns how many bytes the broker can send.
    pub fn room(&self) -> usize {
        match self.reaches_client() {
            true => BUFFER_BYTES.saturating_sub(self.to_client.len()),
            false => usize::MAX,
        }
    }

    pub fn broker_sends(&mut self, bytes: &[u8]) {
        if !self.client_has_closed && self.reaches_client() {
            self.to_client.extend(bytes);
        }
    }
}
