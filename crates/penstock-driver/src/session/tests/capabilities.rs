//! Checks that operations that the broker's engine lacks are refused before any part of them is sent.

use penstock_message::{DEFAULT_PRIORITY, Due, Feature, Message};

use super::*;

fn lacking(feature: Feature) -> Capabilities {
    let mut said = native::on_disk().clone().without(feature);
    said.engine = "Test 1".to_owned();
    said
}

fn publish(number: u8, due: Option<Due>) -> Op {
    Op::Publish {
        queues: vec!["mail".into()],
        message: Message {
            id: MessageId([number; 16]),
            task: "send".into(),
            priority: DEFAULT_PRIORITY,
            expires_at: None,
            result_ttl_ms: None,
            max_deliveries: 3,
            attempt: 0,
            crashes: 0,
            enqueued_at: 0,
            notes: Vec::new(),
            body: Bytes::new(),
            extras: None,
        },
        due,
        unless_key: None,
    }
}

fn delayed(number: u8) -> Tx {
    vec![publish(number, Some(Due::AfterMs(5)))].into()
}

fn at_once(number: u8) -> Tx {
    vec![publish(number, None)].into()
}

const DELAYING: &str = "delaying a job is not offered by Test 1 at unix:test: do without it, or \
     use a broker that has it";

#[test]
fn an_operation_that_the_engine_lacks_is_refused_and_others_go() {
    let mut bench = SessionBench::new();
    bench.connect_to(&lacking(Feature::Delays));
    let (log, deadline) = (Arc::clone(&bench.log), None);
    let done = Box::new(move |outcome: Result<Vec<Receipt>, DriverError>| {
        let Err(DriverError {
            kind: ErrorKind::NotOffered(lacking),
            maybe_accepted: false,
            ..
        }) = outcome
        else {
            panic!("{outcome:?}");
        };
        log.lock().unwrap().push(lacking.feature.into_owned());
    });
    let tx = vec![Encoded::new(delayed(1))];
    bench.session.commit(tx, Durability::Disk, deadline, done);
    assert_eq!(bench.sent(), "");
    assert_eq!(bench.heard(), "delaying a job");

    let several = vec![at_once(2), delayed(3), at_once(4)];
    bench.commit_txs("several", several, Durability::Disk, None);
    assert_eq!(bench.sent(), "commit 1-2 2 ops");
    bench.confirm(2, Vec::new(), Vec::new());
    assert_eq!(
        bench.heard(),
        format!("several: applied, NotOffered({DELAYING:?}), applied")
    );
}

#[test]
fn a_durability_that_the_engine_lacks_is_refused() {
    let mut bench = SessionBench::new();
    bench.connect_to(&lacking(Feature::OsDurability));
    bench.commit_txs("disk", vec![at_once(1)], Durability::Disk, None);
    bench.commit_txs("none", vec![at_once(2)], Durability::None, None);
    assert_eq!(bench.sent(), "commit 1-1 1 ops");
    assert_eq!(
        bench.heard(),
        "disk: durability=\"disk\" is not offered by Test 1 at unix:test: \"none\" is its safest level"
    );
}

#[test]
fn a_question_and_a_consumer_that_the_engine_lacks_are_refused() {
    let mut bench = SessionBench::new();
    bench.connect_to(&lacking(Feature::Inspection).without(Feature::TasksOfConsumers));
    let log = Arc::clone(&bench.log);
    let done = Box::new(move |answer: Result<Answer, DriverError>| {
        log.lock().unwrap().push(answer.unwrap_err().to_string());
    });
    let deadline = bench.now + Duration::from_secs(60);
    let query = Query::Message(MessageId([1; 16]));
    bench.session.query(query, deadline, done);
    let worker = Arc::new(LoggingSink {
        name: "worker",
        keys: HashMap::new(),
        log: Arc::clone(&bench.log),
    });
    let consume = Consume {
        tasks: TaskSelection::Named(vec!["send".into()]),
        ..takes("mail", 5)
    };
    bench.session.consume(consume, worker);
    assert_eq!(bench.sent(), "");
    let at = "is not offered by Test 1 at unix:test: do without it, or use a broker that has it";
    assert_eq!(
        bench.heard(),
        format!("looking at a job {at}; worker: naming the tasks of a worker {at}")
    );
}

/// An engine may be reconfigured between two connections.
#[test]
fn what_was_in_flight_is_refused_where_the_next_engine_lacks_it() {
    let mut bench = SessionBench::connected();
    bench.commit_txs("c", vec![delayed(1), at_once(2)], Durability::Disk, None);
    assert_eq!(bench.sent(), "commit 1-2 2 ops");
    bench.session.disconnected("it ended");
    bench.connect_to(&lacking(Feature::Delays));
    assert_eq!(
        bench.sent(),
        "commit 1-2 1 ops",
        "the number is sent without its operations"
    );
    bench.confirm(2, Vec::new(), Vec::new());
    assert_eq!(
        bench.heard(),
        format!("c: NotOffered({DELAYING:?}), applied")
    );
}

#[test]
fn a_probe_is_answered_by_the_welcome_or_ends_at_its_deadline() {
    let mut bench = SessionBench::new();
    let probe = |bench: &mut SessionBench, ms| {
        let log = Arc::clone(&bench.log);
        let done = Box::new(move |outcome: Result<Arc<Capabilities>, DriverError>| {
            let text = match outcome {
                Ok(said) => format!("delays: {}", said.offers(Feature::Delays)),
                Err(error) => outcome_text(&error),
            };
            log.lock().unwrap().push(text);
        });
        let deadline = bench.start + Duration::from_millis(ms);
        bench.session.probe(deadline, done);
    };
    probe(&mut bench, 5);
    bench.at(5).unwrap();
    assert_eq!(bench.heard(), "not accepted");
    probe(&mut bench, 60_000);
    assert_eq!(bench.heard(), "");
    bench.connect_to(&lacking(Feature::Delays));
    assert_eq!(bench.heard(), "delays: false");
    probe(&mut bench, 60_000);
    assert_eq!(bench.heard(), "delays: false");

    bench.session.disconnected("it ended");
    probe(&mut bench, 60_000);
    assert_eq!(bench.heard(), "", "the next engine may be another");
    bench.connect(0);
    assert_eq!(bench.heard(), "delays: true");
}

#[test]
fn what_settles_a_job_is_as_durable_as_the_engine_can_and_never_refused_for_it() {
    let settled_at = |capabilities: &Capabilities| {
        let mut bench = SessionBench::new();
        let log = Arc::clone(&bench.log);
        let done = Box::new(move |outcome: Result<Vec<Receipt>, DriverError>| {
            log.lock().unwrap().push(format!("{outcome:?}"));
        });
        let tx = vec![Encoded::new(at_once(1))];
        // The engine is not known yet.
        bench.session.commit(tx, None, None, done);
        bench.connect_to(capabilities);
        let mut decoder = Decoder::<proto::ToBroker>::new(MAX_FRAME_BYTES);
        decoder.extend(&bench.session.next_bytes(bench.now));
        let frame = decoder.next_message().unwrap().unwrap();
        assert_eq!(bench.heard(), "");
        frame.commits[0].durability()
    };
    let [disk, os, none] = [
        proto::Durability::Disk,
        proto::Durability::Os,
        proto::Durability::None,
    ];
    assert_eq!(settled_at(native::on_disk()), disk);
    assert_eq!(settled_at(&lacking(Feature::DiskDurability)), os);
    assert_eq!(settled_at(&lacking(Feature::OsDurability)), none);
    let mut replicated = native::on_disk().clone();
    replicated.highest_durability = Durability::Replicated;
    assert_eq!(settled_at(&replicated), disk, "more is for those who ask");
}

/// The engine never reports such a key, so waiting for it would take forever.
#[test]
fn a_watch_of_what_the_engine_does_not_keep_is_refused() {
    let mut bench = SessionBench::new();
    let early = bench.watch("early", &["a"], None);
    bench.connect_to(&lacking(Feature::Values));
    bench.watch("late", &["b"], Some(60_000));
    assert_eq!(bench.sent(), "");
    let refused = "keeping results is not offered by Test 1 at unix:test: do without it, or use a \
                   broker that has it";
    let heard = bench.heard();
    for name in ["early", "late"] {
        assert!(heard.contains(&format!("{name}: {refused}")), "{heard}");
    }
    // They are over: nothing is requested again, and each caller is notified only once.
    bench.session.unwatch(early);
    bench.session.disconnected("it ended");
    bench.connect_to(&lacking(Feature::Values));
    assert_eq!((bench.sent().as_str(), bench.heard().as_str()), ("", ""));
}
