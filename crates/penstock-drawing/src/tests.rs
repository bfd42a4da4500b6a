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
        tasks: Vec::new(),
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

fn running() -> DrawnWorkflow {
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
    DrawnWorkflow::of_page(&page(&steps(), WorkflowState::Running, &nodes)).expect("a workflow")
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

/// Checks a description that was written when the first part was sent.
#[test]
fn a_group_that_is_sent_in_parts_has_as_many_members_as_the_broker_knows() {
    let steps = format!(
        r#"{{"group": 10000, "grows": true, "of": "press.fetch", "id": "{}"}}"#,
        id(1)
    );
    let check = |node, expected: &str| {
        let page = page(&steps, WorkflowState::Running, &[node]);
        let tree = DrawnWorkflow::of_page(&page).expect("a workflow").tree();
        assert_eq!(tree.lines().nth(1), Some(expected));
    };
    let join = |ended, state| NodeState::Join {
        members: 25_000,
        ended,
        failed: 0,
        state,
    };
    check(
        join(3, WorkflowState::Running),
        "└─ group of 25,000 or more x press.fetch  running, 3 of 25,000 have ended",
    );
    check(
        join(25_000, WorkflowState::Succeeded),
        "└─ group of 25,000 x press.fetch  succeeded",
    );
    check(
        NodeState::Gone,
        "└─ group of 10,000 or more x press.fetch  succeeded",
    );
}

/// Adds `load` before the steps it needs.
fn graph() -> DrawnWorkflow {
    let steps = format!(
        r#"{{"chain": [{{"job": "first", "id": "{}"}}, {{"group": 4, "id": "{}", "steps": [
            {{"name": "load", "needs": [[1, "succeeded"], [2, "succeeded"]], "job": "press.load", "id": "{}"}},
            {{"name": "extract", "job": "press.extract", "id": "{}"}},
            {{"name": "clean", "needs": [[1, "succeeded"]], "job": "press.clean", "id": "{}"}},
            {{"name": "tell", "needs": [[0, "failed"], [2, "ended"]], "job": "press.tell", "id": "{}"}}
        ]}}, {{"job": "last", "id": "{}"}}]}}"#,
        id(1),
        id(2),
        id(3),
        id(4),
        id(5),
        id(6),
        id(7)
    );
    let held = NodeState::Job(MessageState::Held);
    let nodes = [
        NodeState::Ended(ValueStatus::Succeeded),
        NodeState::Join {
            members: 4,
            ended: 0,
            failed: 0,
            state: WorkflowState::Running,
        },
        held,
        NodeState::Job(MessageState::Running),
        held,
        held,
        held,
    ];
    DrawnWorkflow::of_page(&page(&steps, WorkflowState::Running, &nodes)).expect("a workflow")
}

#[test]
fn steps_of_a_graph_have_names_and_say_what_they_need() {
    assert_eq!(
        graph().tree(),
        "nightly  running  (1 running, 1,200 succeeded)\n\
         ├─ first  succeeded\n\
         ├─ graph of 4  running\n\
         │  ├─ load: press.load  held, after extract, clean\n\
         │  ├─ extract: press.extract  running\n\
         │  ├─ clean: press.clean  held, after extract\n\
         │  └─ tell: press.tell  held, after load if it fails, clean however it ends\n\
         └─ last  held\n"
    );
}

#[test]
fn the_lines_between_steps_of_a_graph_are_what_they_need() {
    let dot = graph().dot();
    let boxes: Vec<&str> = dot
        .lines()
        .filter_map(|line| line.split_once(" [label=\"")?.1.split("\\n").next())
        .collect();
    assert_eq!(
        boxes,
        [
            "first",
            "extract: press.extract",
            "clean: press.clean",
            "load: press.load",
            "tell: press.tell",
            "last"
        ]
    );
    let edges: Vec<&str> = dot.lines().filter(|line| line.contains("->")).collect();
    assert_eq!(
        edges,
        [
            "  n0 -> n1;",
            "  n1 -> n2;",
            "  n1 -> n3;",
            "  n2 -> n3;",
            "  n3 -> n4 [style=dashed, label=\"failed\"];",
            "  n2 -> n4 [style=dashed, label=\"ended\"];",
            "  n4 -> n5;",
        ]
    );
    assert_eq!(graph().svg().matches("<path").count(), 7);
}

#[test]
fn steps_that_need_each_other_in_a_circle_or_what_is_not_there_are_drawn_all_the_same() {
    let steps = format!(
        r#"{{"group": 3, "id": "{}", "steps": [
            {{"name": "a", "needs": [[1, "succeeded"]], "job": "a", "id": "{}"}},
            {{"name": "b", "needs": [[0, "succeeded"]], "job": "b", "id": "{}"}},
            {{"name": "c", "needs": [[7, "succeeded"]], "job": "c", "id": "{}"}}
        ]}}"#,
        id(1),
        id(2),
        id(3),
        id(4)
    );
    let workflow =
        DrawnWorkflow::of_page(&page(&steps, WorkflowState::Running, &[])).expect("a page");
    assert_eq!(workflow.svg().matches("<rect").count(), 3);
    assert!(workflow.tree().contains("c: c"), "{}", workflow.tree());
}

#[test]
fn what_is_written_for_programs_is_read_again() {
    for workflow in [running(), graph()] {
        let text = workflow.to_json().to_string();
        assert_eq!(DrawnWorkflow::from_json(&text), Some(workflow));
    }
}

#[test]
fn steps_that_are_gone_have_ended() {
    let steps = steps();
    let gone = [NodeState::Gone; 6];
    let workflow = DrawnWorkflow::of_page(&page(&steps, WorkflowState::Succeeded, &gone));
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
        let workflow = DrawnWorkflow::of_page(&page(&chain, WorkflowState::Running, &nodes));
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
        assert_eq!(DrawnStep::read(text.as_bytes()), None, "{text}");
    }
    let workflow =
        DrawnWorkflow::of_page(&page("", WorkflowState::Running, &[])).expect("a workflow");
    assert!(workflow.tree().contains("its steps are not known here"));
}

/// Checks that the picture names the step that has replaced a job: the job keeps its id, so its state is that of the
/// other step.
#[test]
fn a_step_says_what_has_replaced_its_job() {
    let description = format!(
        r#"{{"chain": [{{"job": "press.fetch", "id": "{}"}}, {{"job": "press.bind", "id": "{}"}},
            {{"job": "press.stamp", "id": "{}"}}, {{"job": "press.send", "id": "{}"}}]}}"#,
        id(1),
        id(2),
        id(3),
        id(4)
    );
    let nodes = [
        NodeState::Ended(ValueStatus::Gathered),
        NodeState::Join {
            members: 1200,
            ended: 1,
            failed: 0,
            state: WorkflowState::Running,
        },
        NodeState::Job(MessageState::Held),
        NodeState::Job(MessageState::Held),
    ];
    let mut page = page(&description, WorkflowState::Running, &nodes);
    page.tasks = ["", "", "press.seal", "press.send"]
        .map(str::to_owned)
        .to_vec();
    let workflow = DrawnWorkflow::of_page(&page).expect("a workflow");
    assert_eq!(
        workflow.tree(),
        "nightly  running  (1 running, 1,200 succeeded)\n\
         ├─ press.fetch → group  succeeded\n\
         ├─ press.bind → group of 1,200  running\n\
         ├─ press.stamp → press.seal  held\n\
         └─ press.send  held\n"
    );
    let again = DrawnWorkflow::from_json(&workflow.to_json().to_string()).expect("the same");
    assert_eq!(again, workflow);
    assert!(workflow.dot().contains("press.stamp → press.seal"));
}
