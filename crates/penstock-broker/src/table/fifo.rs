//! A FIFO of small values. It grows and shrinks by chunks, so it never copies itself, and a once long FIFO does not
//! stay large.

use std::collections::VecDeque;

const CHUNK: usize = 4096;

#[derive(Debug)]
pub(crate) struct Fifo<T> {
    chunks: VecDeque<Vec<T>>,
    /// Number of entries of the first chunk that have been popped.
    gone: usize,
    len: usize,
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Self {
            chunks: VecDeque::new(),
            gone: 0,
            len: 0,
        }
    }
}

impl<T: Copy> Fifo<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn push_back(&mut self, item: T) {
        match self.chunks.back_mut() {
            Some(last) if last.len() < CHUNK => last.push(item),
            // The first chunk grows with use, since most FIFOs stay short.
            None => self.chunks.push_back(vec![item]),
            Some(_) => {
                let mut next = Vec::with_capacity(CHUNK);
                next.push(item);
                self.chunks.push_back(next);
            }
        }
        self.len += 1;
    }

    pub(crate) fn front(&self) -> Option<T> {
        self.chunks.front()?.get(self.gone).copied()
    }

    pub(crate) fn front_mut(&mut self) -> Option<&mut T> {
        self.chunks.front_mut()?.get_mut(self.gone)
    }

    pub(crate) fn back_mut(&mut self) -> Option<&mut T> {
        match self.len {
            0 => None,
            _ => self.chunks.back_mut()?.last_mut(),
        }
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        let item = self.front()?;
        self.gone += 1;
        self.len -= 1;
        if self.len == 0 {
            self.clear();
        } else if self.gone == CHUNK {
            self.chunks.pop_front();
            self.gone = 0;
        }
        Some(item)
    }

    /// Removes everything, but keeps the memory of one chunk.
    pub(crate) fn clear(&mut self) {
        self.chunks.truncate(1);
        if let Some(first) = self.chunks.front_mut() {
            first.clear();
        }
        self.gone = 0;
        self.len = 0;
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = T> {
        self.chunks.iter().flatten().skip(self.gone).copied()
    }

    pub(crate) fn retain(&mut self, is_wanted: impl Fn(T) -> bool) {
        let mut old = std::mem::take(self);
        while let Some(item) = old.pop_front() {
            if is_wanted(item) {
                self.push_back(item);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_keeps_its_order_over_chunks_and_frees_them() {
        let mut fifo = Fifo::default();
        let mut next = 0;
        for round in 0..5 {
            for item in 0..10_000_u32 {
                fifo.push_back(round * 10_000 + item);
            }
            for _ in 0..9_000 {
                assert_eq!(fifo.front(), Some(next));
                assert_eq!(fifo.pop_front(), Some(next));
                next += 1;
            }
        }
        assert_eq!(fifo.len(), 5_000);
        assert!(fifo.iter().eq(next..50_000));
        assert_eq!(fifo.back_mut().copied(), Some(49_999));
        fifo.retain(|item| item % 2 == 0);
        assert!(fifo.iter().eq((next..50_000).filter(|item| item % 2 == 0)));
        while fifo.pop_front().is_some() {}
        assert_eq!(
            (fifo.chunks.len(), fifo.front(), fifo.is_empty()),
            (1, None, true)
        );
    }
}
