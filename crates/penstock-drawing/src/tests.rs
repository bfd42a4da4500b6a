use penstock_message::{
    MessageId, MessageState, NodeState, ValueStatus, WorkflowCounts, WorkflowState, WorkflowsPage,
};

use super::*;

fn page(description: &str, state: WorkflowState, nodes: &[NodeState]) -> WorkflowsPage {
    WorkflowsPage {
        workflows: vec![WorkflowInfo {
            id: MessageId([7; 16]),
            name: "nightly".to_owned(),
            description: description.to_owned().into_bytes().into(),
            state,
            jobs: WorkflowCounts {
                running: 1,
                succeeded: 1200,
                ..WorkflowCounts::default()
            },
            opened_at: 1_700_000_000_000,
            ..WorkflowInfo::default()
        }],
        next: None,
        nodes: nodes.to_vec(),
    }
}

fn id(byte: u8) -> String {
    MessageId([byte; 16]).to_string()
}

fn steps() -> String {
    format!(
        r#"{{"chain": [
            {{"group": 1200, "of": "press.fetch", "id": "{}"}},
            {{"job": "press.bind", "id": "{}", "links": [{{"on": "failed", "job": "press.report", "id": "{}"}}]}},
            {{"group": 2, "id": "{}", "steps": [{{"job": "press.stamp", "id": "{}"}}, {{"job": "a <b> & \"c\"", "id": "{}"}}]}}
        ], "more": 3}}"#,
        id(1),
        id(2),
        id(3),
        id(4),
        id(5),
        id(6)
    )
}

fn running() -> Workflow {
    let nodes = [
        NodeState::Join {
            members: 1200,
            ended: 1200,
            failed: 2,
            state: WorkflowState::Succeeded,
        },
        NodeState::Job(MessageState::Running),
        NodeState::Job(MessageState::Held),
        NodeState::Join {
            members: 2,
            ended: 0,
            failed: 0,
            state: WorkflowState::Running,
        },
        NodeState::Job(MessageState::Held),
        NodeState::Job(MessageState::Held),
    ];
    Workflow::of_page(&page(&steps(), WorkflowState::Running, &nodes)).expect("a workflow")
}

#[test]
fn a_workflow_is_drawn_as_a_tree() {
    assert_eq!(
        running().tree(),
        "nightly  running  (1 running, 1,200 succeeded)\n\
         ├─ group of 1,200 x press.fetch  succeeded, 1,200 of 1,200 have ended, 2 failed\n\
         ├─ press.bind  running\n\
         │  └─ if failed: press.report  held\n\
         ├─ group of 2  held\n\
         │  ├─ press.stamp  held\n\
         │  └─ a <b> & \"c\"  held\n\
         └─ and 3 more steps\n"
    );
}

#[test]
fn a_workflow_is_written_as_dot() {
    let dot = running().dot();
    for line in [
        "digraph \"nightly\" {",
        "  n0 [label=\"group of 1,200 x press.fetch\\nsucceeded\", fillcolor=\"#d7f0dc\"];",
        "  n0 -> n1;",
        "  n1 -> n2 [style=dashed, label=\"failed\"];",
        "  n1 -> n3;",
        "  n1 -> n4;",
        "  n4 [label=\"a <b> & \\\"c\\\"\\nheld\", fillcolor=\"#ffffff\"];",
        "  n3 -> n5;",
    ] {
        assert!(dot.lines().any(|other| other == line), "{line} in\n{dot}");
    }
    assert_eq!(dot.matches("->").count(), 6, "{dot}");
}

#[test]
fn a_workflow_is_drawn_as_a_picture() {
    let svg = running().svg();
    assert_eq!(svg.matches("<rect").count(), 6, "{svg}");
    assert_eq!(svg.matches("<path").count(), 6, "{svg}");
    assert!(svg.contains("a &lt;b&gt; &amp; &quot;c&quot;"), "{svg}");
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
}

#[test]
fn what_is_written_for_programs_is_read_again() {
    let workflow = running();
    let text = workflow.to_json().to_string();
    assert_eq!(Workflow::from_json(&text), Some(workflow));
}

#[test]
fn steps_that_are_gone_have_ended() {
    let steps = steps();
    let gone = [NodeState::Gone; 6];
    let workflow = Workflow::of_page(&page(&steps, WorkflowState::Succeeded, &gone));
    let steps = workflow.and_then(|workflow| workflow.steps).expect("steps");
    let states: Vec<&str> = steps.inner().0.iter().map(|step| step.state).collect();
    assert_eq!(states, ["succeeded", "ended", "succeeded"]);
}

#[test]
fn the_state_of_a_chain_is_that_of_its_worst_step() {
    let chain = format!(
        r#"{{"chain": [{{"job": "a", "id": "{}"}}, {{"job": "b", "id": "{}"}}]}}"#,
        id(1),
        id(2)
    );
    let check = |first, second, expected| {
        let nodes = [first, second];
        let workflow = Workflow::of_page(&page(&chain, WorkflowState::Running, &nodes));
        let steps = workflow.and_then(|workflow| workflow.steps).expect("steps");
        assert_eq!(steps.state, expected);
    };
    let (ended, job) = (NodeState::Ended, NodeState::Job);
    check(job(MessageState::Ready), job(MessageState::Held), "waiting");
    check(
        ended(ValueStatus::Succeeded),
        job(MessageState::Ready),
        "running",
    );
    check(
        ended(ValueStatus::Succeeded),
        ended(ValueStatus::Succeeded),
        "succeeded",
    );
    check(
        job(MessageState::Failed),
        job(MessageState::Blocked),
        "failed",
    );
}

#[test]
fn what_nobody_can_read_is_no_step() {
    let deep = "{\"chain\":[".repeat(200) + &"]}".repeat(200);
    for text in [
        "",
        "tree",
        "[]",
        "{}",
        "{\"chain\": [{\"job\": 1}]}",
        "{\"chain\": 1}",
        &deep,
    ] {
        assert_eq!(Step::read(text.as_bytes()), None, "{text}");
    }
    let workflow = Workflow::of_page(&page("", WorkflowState::Running, &[])).expect("a workflow");
    assert!(workflow.tree().contains("its steps are not known here"));
}
