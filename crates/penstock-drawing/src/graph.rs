//! Steps as boxes, with lines between them.

use crate::step::{DrawnStep, What};
use crate::text::number;

/// Box for one step, or for a group of many.
pub(crate) struct StepNode {
    pub(crate) label: String,
    pub(crate) state: &'static str,
}

pub(crate) struct StepEdge {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Outcome on which a callback runs; `None`: the next step.
    pub(crate) on: Option<String>,
}

#[derive(Default)]
pub(crate) struct StepGraph {
    pub(crate) nodes: Vec<StepNode>,
    pub(crate) edges: Vec<StepEdge>,
}

impl StepGraph {
    pub(crate) fn of(steps: Option<&DrawnStep>) -> Self {
        let mut graph = Self::default();
        if let Some(steps) = steps {
            graph.add(steps, &[], None);
        }
        graph
    }

    /// Adds a step after these boxes; returns the boxes in which it ends.
    fn add(&mut self, step: &DrawnStep, behind: &[usize], on: Option<&str>) -> Vec<usize> {
        let ends = match &step.what {
            What::Chain(steps, more) => {
                let mut ends = behind.to_vec();
                let mut on = on;
                for step in steps {
                    ends = self.add(step, &ends, on.take());
                }
                match more {
                    0 => ends,
                    more => self.put(format!("{} more steps", number(*more)), "", &ends, on),
                }
            }
            What::Group { steps, .. } if !steps.is_empty() => self.add_group(steps, behind, on),
            What::Job(_) | What::Group { .. } => {
                self.put(step.full_label(), step.state, behind, on)
            }
        };
        for (on, step) in &step.links {
            self.add(step, &ends, Some(on));
        }
        ends
    }

    /// Adds the members of a group, each after the ones it needs. Returns the ends of members that no other needs.
    fn add_group(&mut self, steps: &[DrawnStep], behind: &[usize], on: Option<&str>) -> Vec<usize> {
        let mut ends: Vec<Option<Vec<usize>>> = vec![None; steps.len()];
        let mut is_needed = vec![false; steps.len()];
        for place in in_order(steps) {
            let step = &steps[place];
            // A client may send any needs: a box that was not drawn yet leads nowhere.
            let needs = step.needs.iter().filter_map(|(place, outcome)| {
                let ends = ends.get(*place)?.clone()?;
                Some((*place, ends, outcome.as_str()))
            });
            let needs: Vec<_> = needs.collect();
            let first = self.nodes.len();
            let members = match needs.is_empty() {
                true => self.add(step, behind, on),
                false => self.add(step, &[], None),
            };
            for (place, ends, outcome) in needs {
                is_needed[place] = true;
                for to in self.beginnings(first) {
                    self.edges.extend(ends.iter().map(|from| StepEdge {
                        from: *from,
                        to,
                        on: (outcome != "succeeded").then(|| outcome.to_owned()),
                    }));
                }
            }
            ends[place] = Some(members);
        }
        let ends = ends.into_iter().zip(is_needed);
        ends.filter_map(|(ends, is_needed)| ends.filter(|_| !is_needed))
            .flatten()
            .collect()
    }

    /// Returns the boxes from this one on that none of these leads to.
    fn beginnings(&self, first: usize) -> Vec<usize> {
        let has_none_before = |to: &usize| {
            let mut edges = self.edges.iter();
            !edges.any(|edge| edge.to == *to && edge.from >= first)
        };
        (first..self.nodes.len()).filter(has_none_before).collect()
    }

    fn put(
        &mut self,
        label: String,
        state: &'static str,
        behind: &[usize],
        on: Option<&str>,
    ) -> Vec<usize> {
        let to = self.nodes.len();
        self.nodes.push(StepNode { label, state });
        let edges = behind.iter().map(|from| StepEdge {
            from: *from,
            to,
            on: on.map(str::to_owned),
        });
        self.edges.extend(edges);
        vec![to]
    }

    /// Returns the column of each box: one after all boxes that lead to it.
    pub(crate) fn columns(&self) -> Vec<usize> {
        let mut columns = vec![0; self.nodes.len()];
        // Boxes are added after the boxes that lead to them.
        for edge in &self.edges {
            columns[edge.to] = columns[edge.to].max(columns[edge.from] + 1);
        }
        columns
    }
}

/// Returns the members of a group in drawing order, each after the ones it needs. Members that need each other in a
/// circle, which our own clients never send, come last.
fn in_order(steps: &[DrawnStep]) -> Vec<usize> {
    let mut waits: Vec<usize> = steps.iter().map(|step| step.needs.len()).collect();
    let mut needed_by = vec![Vec::new(); steps.len()];
    for (place, step) in steps.iter().enumerate() {
        for (needed, _) in &step.needs {
            if let Some(followers) = needed_by.get_mut(*needed) {
                followers.push(place);
            }
        }
    }
    let mut order: Vec<usize> = (0..steps.len())
        .filter(|place| waits[*place] == 0)
        .collect();
    let mut next = 0;
    while let Some(place) = order.get(next).copied() {
        next += 1;
        for follower in &needed_by[place] {
            waits[*follower] -= 1;
            if waits[*follower] == 0 {
                order.push(*follower);
            }
        }
    }
    order.extend((0..steps.len()).filter(|place| waits[*place] > 0));
    order
}
