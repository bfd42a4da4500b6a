//! The graph as DOT and as SVG.

use std::fmt::Write as _;

use crate::DrawnWorkflow;
use crate::graph::StepGraph;

const WIDTH: usize = 190;
const HEIGHT: usize = 44;
const GAP: usize = 56;
const ROW_GAP: usize = 18;
const MARGIN: usize = 16;
/// Number of characters of a label that fit into a box.
const FITS: usize = 28;

fn color(state: &str) -> &'static str {
    match state {
        "succeeded" => "#d7f0dc",
        "failed" | "crashed" | "expired" => "#f8d4d0",
        "running" | "cancelling" => "#d6e6fa",
        "blocked" | "cancelled" => "#ececec",
        _ => "#ffffff",
    }
}

pub(crate) fn dot(workflow: &DrawnWorkflow) -> String {
    let graph = StepGraph::of(workflow.steps.as_ref());
    let mut out = String::new();
    let name = quoted(&workflow.name);
    out += &format!("digraph {name} {{\n  rankdir=LR;\n  label={name};\n");
    out += "  node [shape=box, style=filled, fontname=\"sans-serif\"];\n";
    for (place, node) in graph.nodes.iter().enumerate() {
        let label = quoted(&format!("{}\n{}", node.label, node.state));
        let color = color(node.state);
        let _ = writeln!(out, "  n{place} [label={label}, fillcolor=\"{color}\"];");
    }
    for edge in &graph.edges {
        let (from, to) = (edge.from, edge.to);
        let _ = match &edge.on {
            None => writeln!(out, "  n{from} -> n{to};"),
            Some(on) => writeln!(
                out,
                "  n{from} -> n{to} [style=dashed, label={}];",
                quoted(on)
            ),
        };
    }
    out + "}\n"
}

/// Quotes a text as DOT does; an `\n` breaks the line.
fn quoted(text: &str) -> String {
    let text = text.trim_end().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('\n', "\\n"))
}

pub(crate) fn svg(workflow: &DrawnWorkflow) -> String {
    let graph = StepGraph::of(workflow.steps.as_ref());
    let columns = graph.columns();
    let mut rows: Vec<usize> = Vec::new();
    let places: Vec<(usize, usize)> = columns
        .iter()
        .map(|column| {
            if *column >= rows.len() {
                rows.resize(column + 1, 0);
            }
            let row = rows[*column];
            rows[*column] += 1;
            (
                MARGIN + column * (WIDTH + GAP),
                2 * MARGIN + row * (HEIGHT + ROW_GAP),
            )
        })
        .collect();
    let width = 2 * MARGIN + rows.len().max(1) * (WIDTH + GAP) - GAP;
    let tallest = rows.iter().copied().max().unwrap_or(0).max(1);
    let height = 3 * MARGIN + tallest * (HEIGHT + ROW_GAP) - ROW_GAP;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n"
    );
    let title = escaped(&format!("{}: {}", workflow.name, workflow.state));
    let _ = writeln!(out, "<title>{title}</title>");
    let _ = writeln!(
        out,
        "<text x=\"{MARGIN}\" y=\"{}\">{title}</text>",
        MARGIN + 4
    );
    for edge in &graph.edges {
        let ((x1, y1), (x2, y2)) = (places[edge.from], places[edge.to]);
        let (x1, y1, y2) = (x1 + WIDTH, y1 + HEIGHT / 2, y2 + HEIGHT / 2);
        let middle = x1.midpoint(x2);
        let dashes = match edge.on {
            None => "",
            Some(_) => " stroke-dasharray=\"4 3\"",
        };
        let _ = writeln!(
            out,
            "<path d=\"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}\" fill=\"none\" stroke=\"#888888\"{dashes}/>"
        );
    }
    for (node, (x, y)) in graph.nodes.iter().zip(&places) {
        let color = color(node.state);
        let middle = x + WIDTH / 2;
        let label = escaped(&cut(&node.label));
        let _ = writeln!(
            out,
            "<g><title>{}</title><rect x=\"{x}\" y=\"{y}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"5\" \
             fill=\"{color}\" stroke=\"#666666\"/>",
            escaped(&format!("{} {}", node.label, node.state))
        );
        let _ = writeln!(
            out,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{label}</text>\
             <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555555\">{}</text></g>",
            y + 18,
            y + 35,
            node.state
        );
    }
    out + "</svg>\n"
}

/// Shortens a label at its beginning: the end of a task's name says most.
fn cut(label: &str) -> String {
    let count = label.chars().count();
    match count > FITS {
        false => label.to_owned(),
        true => {
            let end: String = label.chars().skip(count - FITS + 1).collect();
            format!("…{end}")
        }
    }
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '&' => out += "&amp;",
            '"' => out += "&quot;",
            // XML allows no other control characters.
            '\t' | '\n' => out.push(' '),
            character if character.is_control() => out.push('\u{fffd}'),
            character => out.push(character),
        }
    }
    out
}
