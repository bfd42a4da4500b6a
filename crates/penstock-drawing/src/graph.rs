//! The steps as boxes and lines between them.

use crate::step::{Step, What};
use crate::text::number;

/// A box: one step, or a group of many.
pub(crate) struct Node {
    pub(crate) label: String,
    pub(crate) state: &'static str,
}

pub(crate) struct Edge {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Outcome on which a callback runs; `None`: the next step.
    pub(crate) on: Option<String>,
}

#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) edges: Vec<Edge>,
}

impl Graph {
    pub(crate) fn of(steps: Option<&Step>) -> Self {
        let mut graph = Self::default();
        if let Some(steps) = steps {
            graph.add(steps, &[], None);
        }
        graph
    }

    /// Adds a step behind these boxes; returns those in which it ends.
    fn add(&mut self, step: &Step, behind: &[usize], on: Option<&str>) -> Vec<usize> {
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
            What::Group { steps, .. } if !steps.is_empty() => {
                let members = steps.iter().map(|step| self.add(step, behind, on));
                members.flatten().collect()
            }
            What::Job(_) | What::Group { .. } => self.put(step.label(), step.state, behind, on),
        };
        for (on, step) in &step.links {
            self.add(step, &ends, Some(on));
        }
        ends
    }

    fn put(
        &mut self,
        label: String,
        state: &'static str,
        behind: &[usize],
        on: Option<&str>,
    ) -> Vec<usize> {
        let to = self.nodes.len();
        self.nodes.push(Node { label, state });
        let edges = behind.iter().map(|from| Edge {
            from: *from,
            to,
            on: on.map(str::to_owned),
        });
        self.edges.extend(edges);
        vec![to]
    }

    /// Returns the column of each box: one behind all that lead to it.
    pub(crate) fn columns(&self) -> Vec<usize> {
        let mut columns = vec![0; self.nodes.len()];
        // Boxes are added behind those that lead to them.
        for edge in &self.edges {
            columns[edge.to] = columns[edge.to].max(columns[edge.from] + 1);
        }
        columns
    }
}
