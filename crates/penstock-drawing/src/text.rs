//! The tree on a terminal.

use crate::DrawnWorkflow;
use crate::step::{DrawnStep, What};

pub(crate) fn tree(workflow: &DrawnWorkflow) -> String {
    let jobs = workflow.jobs.iter().filter(|(_, count)| *count > 0);
    let jobs: Vec<String> = jobs
        .map(|(state, count)| format!("{} {state}", number(*count)))
        .collect();
    let mut lines = vec![format!(
        "{}  {}  ({})",
        workflow.name,
        workflow.state,
        match jobs.is_empty() {
            true => "no jobs".to_owned(),
            false => jobs.join(", "),
        }
    )];
    match &workflow.steps {
        Some(DrawnStep {
            what: What::Chain(steps, more),
            links,
            ..
        }) => draw_all(steps, *more, links, "", &mut lines),
        Some(step) => draw_all(std::slice::from_ref(step), 0, &[], "", &mut lines),
        None => lines.push("its steps are not known here".to_owned()),
    }
    lines.join("\n") + "\n"
}

fn draw_all(
    steps: &[DrawnStep],
    more: u64,
    links: &[(String, DrawnStep)],
    indent: &str,
    lines: &mut Vec<String>,
) {
    let mut items: Vec<(String, Option<&DrawnStep>)> = Vec::new();
    items.extend(steps.iter().map(|step| (String::new(), Some(step))));
    if more > 0 {
        items.push((format!("and {} more steps", number(more)), None));
    }
    items.extend(
        links
            .iter()
            .map(|(on, step)| (format!("if {on}: "), Some(step))),
    );
    let last = items.len().saturating_sub(1);
    for (place, (before, step)) in items.into_iter().enumerate() {
        let (branch, below) = match place == last {
            true => ("└─ ", "   "),
            false => ("├─ ", "│  "),
        };
        let said = step.map_or_else(String::new, line);
        let needed = step.map_or_else(String::new, |step| needed(step, steps));
        lines.push(format!("{indent}{branch}{before}{said}{needed}"));
        if let Some(step) = step {
            let (steps, more) = step.inner();
            draw_all(steps, more, &step.links, &format!("{indent}{below}"), lines);
        }
    }
}

/// Names the siblings that a step of a graph waits for.
fn needed(step: &DrawnStep, siblings: &[DrawnStep]) -> String {
    let named = step.needs.iter().filter_map(|(place, outcome)| {
        let name = &siblings.get(*place)?.name;
        Some(match outcome.as_str() {
            "succeeded" => name.clone(),
            "failed" => format!("{name} if it fails"),
            _ => format!("{name} however it ends"),
        })
    });
    let named: Vec<String> = named.collect();
    match named.is_empty() {
        true => String::new(),
        false => format!(", after {}", named.join(", ")),
    }
}

fn line(step: &DrawnStep) -> String {
    let mut line = step.full_label();
    if !step.state.is_empty() {
        line += &format!("  {}", step.state);
    }
    if let What::Group {
        members,
        ended: Some((ended, failed)),
        ..
    } = &step.what
        && (step.state == "running" || *failed > 0)
    {
        line += &format!(", {} of {} have ended", number(*ended), number(*members));
        if *failed > 0 {
            line += &format!(", {} failed", number(*failed));
        }
    }
    line
}

impl DrawnStep {
    /// Describes the step, with its name in its graph.
    pub(crate) fn full_label(&self) -> String {
        match self.name.is_empty() {
            true => self.label(),
            false => format!("{}: {}", self.name, self.label()),
        }
    }

    /// Describes the step.
    fn label(&self) -> String {
        match &self.what {
            What::Job(task) if self.replaced_by.is_empty() => task.clone(),
            What::Job(task) => format!("{task} → {}", self.replaced_by),
            What::Chain(..) => "chain".to_owned(),
            What::Group {
                members, of, steps, ..
            } if of.is_empty() => {
                let is_graph = steps.iter().any(|step| !step.name.is_empty());
                let kind = if is_graph { "graph" } else { "group" };
                format!("{kind} of {}", number(*members))
            }
            What::Group {
                members, grows, of, ..
            } => {
                let more = if *grows { " or more" } else { "" };
                format!("group of {}{more} x {of}", number(*members))
            }
        }
    }

    /// Returns the steps that it consists of, and the number of omitted ones.
    pub(crate) fn inner(&self) -> (&[DrawnStep], u64) {
        match &self.what {
            What::Job(_) => (&[], 0),
            What::Chain(steps, more) => (steps, *more),
            What::Group { steps, .. } => (steps, 0),
        }
    }
}

/// Formats with commas: 1,000,000.
pub(crate) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
