//! Active flows, by virtual time.

use std::collections::BTreeSet;

/// A virtual time, and the flow that has it.
pub(crate) type FlowTurn = (u64, u32);

/// Flows in turn. The first is kept outside the tree, since most levels have one flow, and each job moves a flow twice.
#[derive(Debug, Default)]
pub(crate) struct ActiveFlows {
    first: Option<FlowTurn>,
    rest: BTreeSet<FlowTurn>,
}

impl ActiveFlows {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Whether there is one flow, or none.
    #[inline]
    pub(crate) fn is_alone(&self) -> bool {
        self.rest.is_empty()
    }

    #[inline]
    pub(crate) fn first(&self) -> Option<FlowTurn> {
        self.first
    }

    pub(crate) fn contains(&self, turn: FlowTurn) -> bool {
        self.first == Some(turn) || self.rest.contains(&turn)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = FlowTurn> {
        self.first.into_iter().chain(self.rest.iter().copied())
    }

    #[inline]
    pub(crate) fn insert(&mut self, turn: FlowTurn) {
        match self.first {
            None => self.first = Some(turn),
            Some(first) if turn < first => {
                self.rest.insert(first);
                self.first = Some(turn);
            }
            Some(_) => {
                self.rest.insert(turn);
            }
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, turn: FlowTurn) {
        if self.first == Some(turn) {
            self.first = match self.rest.is_empty() {
                true => None,
                false => self.rest.pop_first(),
            };
        } else {
            self.rest.remove(&turn);
        }
    }

    /// Moves a flow to another virtual time.
    #[inline]
    pub(crate) fn replace(&mut self, old: FlowTurn, new: FlowTurn) {
        if self.rest.is_empty() && self.first == Some(old) {
            self.first = Some(new);
        } else {
            self.remove(old);
            self.insert(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_in_order_however_flows_come_and_go() {
        let mut active = ActiveFlows::default();
        assert!(active.is_empty() && active.is_alone());
        for turn in [(5, 1), (3, 2), (9, 3), (3, 4)] {
            active.insert(turn);
        }
        assert!(active.iter().eq([(3, 2), (3, 4), (5, 1), (9, 3)]));
        active.replace((3, 2), (7, 2));
        active.replace((9, 3), (1, 3));
        assert!(active.iter().eq([(1, 3), (3, 4), (5, 1), (7, 2)]));
        active.remove((1, 3));
        active.remove((5, 1));
        assert_eq!(active.first(), Some((3, 4)));
        assert!(active.contains((7, 2)) && active.contains((3, 4)) && !active.contains((5, 1)));
        active.remove((3, 4));
        active.replace((7, 2), (8, 2));
        assert!(active.is_alone() && active.iter().eq([(8, 2)]));
    }
}
