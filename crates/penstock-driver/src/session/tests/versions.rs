//! Tests clients and brokers of different protocol versions.

use penstock_message::{Filter, MessageId, OnRunning, Query, Target};
use penstock_wire::{ADDITIONS, Addition, Within};
use prost::Message as _;

use super::*;
use crate::encoded::Form;

/// Additions of version 3 for these tests: an operation, and a field of a message.
const ADDED_BY_3: &[Addition] = &[
    Addition {
        since: 3,
        what: "weighing jobs",
        within: Within::Tx,
        path: &[1],
        fields: (30, 30),
    },
    Addition {
        since: 3,
        what: "the colour of a job",
        within: Within::Tx,
        path: &[1, 4, 2],
        fields: (40, 40),
    },
];
const OF_3: Versions = Versions {
    lowest: 2,
    highest: 3,
    additions: ADDED_BY_3,
};
/// Versions of a current program that still spoke version 1.
const FROM_1: Versions = Versions {
    lowest: 1,
    highest: 2,
    additions: ADDITIONS,
};

/// Encodes a field of bytes.
fn field(number: u32, held: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::bytes::encode(number, &held.to_vec(), &mut bytes);
    bytes
}

fn plain_tx() -> Encoded {
    Encoded::new(Tx::from(vec![purge(3)]))
}

fn tx_with_the_operation_of_3() -> Encoded {
    let tx = [
        convert::encode_tx(Tx::from(vec![purge(3)])).to_vec(),
        field(1, &field(30, b"weigh")),
    ];
    Form::Whole(tx.concat().into()).into()
}

fn tx_with_the_field_of_3() -> Encoded {
    let message = [field(1, &[1; 16]), field(40, b"red")].concat();
    let publish = [field(1, b"mail"), field(2, &message)].concat();
    Form::Whole(field(1, &field(4, &publish)).into()).into()
}

impl SessionBench {
    fn meet(&mut self, version: u32, welcome: proto::Welcome) -> Result<(), LinkEnd> {
        self.session.connected(self.now, Vec::new());
        self.sent();
        self.told(proto::ToClient {
            welcome: Some(proto::Welcome {
                broker_version: "9.9.9".into(),
                ..welcome_of(version, welcome)
            }),
            ..Default::default()
        })
    }

    fn told(&mut self, frame: proto::ToClient) -> Result<(), LinkEnd> {
        self.session.handle(self.now, frame)
    }

    fn told_to_go(&mut self, why: proto::close::Why) -> LinkEnd {
        let close = proto::Close {
            why: why.into(),
            text: String::new(),
        };
        let end = self.told(proto::ToClient {
            close: Some(close),
            ..Default::default()
        });
        self.session.disconnected("it ended");
        end.unwrap_err()
    }

    fn ask(&mut self, query: Query) {
        let log = Arc::clone(&self.log);
        let done = Box::new(move |answer: Result<Answer, DriverError>| {
            let text = match answer {
                Ok(answer) => format!("{answer:?}"),
                Err(error) if matches!(error.kind, ErrorKind::NotOffered(_)) => {
                    format!("not offered: {error}")
                }
                Err(error) => format!("{error:?}"),
            };
            log.lock().unwrap().push(text);
        });
        let deadline = self.now + Duration::from_secs(60);
        self.session.query(query, deadline, done);
    }
}

const WEIGHING: &str = "weighing jobs is not offered by the broker at unix:test, which speaks version 2 of \
     the protocol: that needs version 3. Upgrade penstock on the broker's machine, and restart the broker";
const COLOUR: &str = "the colour of a job is not offered by the broker at unix:test, which speaks version 2 \
     of the protocol: that needs version 3. Upgrade penstock on the broker's machine, and restart the broker";

/// Formats a refusal as the receipt of one transaction among others.
fn among_others(refused: &str) -> String {
    format!("NotOffered({refused:?})")
}

#[test]
fn a_client_of_3_sends_a_broker_of_2_nothing_that_came_later() {
    let mut bench = SessionBench::of_versions(OF_3, false);
    let all = || {
        vec![
            plain_tx(),
            tx_with_the_operation_of_3(),
            tx_with_the_field_of_3(),
            plain_tx(),
        ]
    };
    bench.meet(2, proto::Welcome::default()).unwrap();
    bench.commit_encoded("c", all(), Durability::Disk, None);
    assert_eq!(bench.sent(), "commit 1-2 2 ops");
    bench.confirm(2, Vec::new(), Vec::new());
    assert_eq!(
        bench.heard(),
        format!(
            "c: applied, {}, {}, applied",
            among_others(WEIGHING),
            among_others(COLOUR)
        )
    );

    let mut bench = SessionBench::of_versions(OF_3, false);
    bench.meet(3, proto::Welcome::default()).unwrap();
    bench.commit_encoded("c", all(), Durability::Disk, None);
    assert_eq!(bench.sent(), "commit 1-4 5 ops");
}

#[test]
fn a_part_of_a_large_transaction_is_looked_at_too() {
    let mut bench = SessionBench::of_versions(OF_3, false);
    let Form::Whole(later) = tx_with_the_operation_of_3().form else {
        unreachable!("it is small");
    };
    let Form::Whole(plain) = plain_tx().form else {
        unreachable!("it is small");
    };
    bench.meet(2, proto::Welcome::default()).unwrap();
    let parts = Encoded::from(Form::Parts(vec![plain, later]));
    bench.commit_encoded("c", vec![parts], Durability::Disk, None);
    assert_eq!(bench.sent(), "");
    assert_eq!(bench.heard(), format!("c: {WEIGHING}"));
}

/// A broker of version 3 was killed before it applied them, and one of version 2 started.
#[test]
fn what_a_newer_broker_was_sent_is_refused_when_an_older_one_follows() {
    let mut bench = SessionBench::of_versions(OF_3, false);
    bench.meet(3, proto::Welcome::default()).unwrap();
    bench.commit_encoded("first", vec![plain_tx()], Durability::Disk, None);
    let both = vec![tx_with_the_operation_of_3(), plain_tx()];
    bench.commit_encoded("both", both, Durability::Disk, None);
    assert_eq!(bench.sent(), "commit 1-3 4 ops");
    bench.confirm(1, Vec::new(), Vec::new());
    assert_eq!(bench.heard(), "first: applied");
    bench.session.disconnected("it was killed");
    let welcome = proto::Welcome {
        applied_through: 1,
        ..Default::default()
    };
    bench.meet(2, welcome).unwrap();
    assert_eq!(
        bench.sent(),
        "commit 2-3 1 ops",
        "the number is sent without its operations"
    );
    bench.confirm(3, Vec::new(), Vec::new());
    let weighing = among_others(WEIGHING);
    assert_eq!(bench.heard(), format!("both: {weighing}, applied"));
}

#[test]
fn an_operation_and_a_question_of_2_are_not_sent_to_a_broker_of_1() {
    let mut bench = SessionBench::of_versions(FROM_1, false);
    bench.meet(1, proto::Welcome::default()).unwrap();
    let cancel = Op::Cancel {
        target: Target::Filter(Filter::default()),
        reason: String::new(),
        running: OnRunning::Ask,
    };
    bench.commit_txs("c", vec![Tx::from(vec![cancel])], Durability::Disk, None);
    bench.ask(Query::Operation(7));
    bench.ask(Query::Message(MessageId([1; 16])));
    assert_eq!(bench.sent(), "query 3");
    let lacking = |what| {
        format!(
            "{what} is not offered by the broker at unix:test, which speaks version 1 of the protocol: that needs \
             version 2. Upgrade penstock on the broker's machine, and restart the broker"
        )
    };
    assert_eq!(
        bench.heard(),
        format!(
            "c: {}; not offered: {}",
            lacking("cancelling jobs"),
            lacking("asking about an operation on many jobs")
        )
    );
}

/// A broker that speaks version 2 to this client may still add its own fields.
#[test]
fn what_a_broker_of_3_says_beyond_version_2_is_passed_over() {
    let mut bench = SessionBench::connected();
    bench.watch("w", &["a"], None);
    bench.commit("c", None);
    bench.sent();
    let id = bench.id("a");
    let value = proto::KeyValue::from((Key::Result(id), present("one")));
    let frame = [
        // Contains a confirm and a value with one more field each, a notice of a later kind, and a completely
        // new list.
        field(2, &[vec![8, 1], field(30, b"later")].concat()),
        field(4, &[value.encode_to_vec(), field(30, b"later")].concat()),
        field(6, &field(30, b"later")),
        field(30, b"later"),
    ];
    let frame = proto::ToClient::decode(&frame.concat()[..]).unwrap();
    bench.told(frame).unwrap();
    assert_eq!(bench.heard(), "c: applied; w: a one");
    assert_eq!(bench.session.take_notices(), []);
}

#[test]
fn without_a_common_version_both_are_named_and_what_to_install() {
    let ours = env!("CARGO_PKG_VERSION");
    let check = |version: u32, expected: String| {
        let mut bench = SessionBench::new();
        let end = bench.meet(version, proto::Welcome::default());
        assert_eq!(end, Err(LinkEnd::Hopeless(ErrorKind::Invalid, expected)));
    };
    check(
        1,
        format!(
            "the broker at unix:test (penstock 9.9.9) speaks version 1 of the protocol and this client (penstock {ours}) \
             version 2: stop that broker (with `penstock broker stop`, if it is a local one) and start penstock {ours} in its \
             place; everything that was confirmed is kept"
        ),
    );
    check(
        3,
        format!(
            "the broker at unix:test (penstock 9.9.9) speaks version 3 of the protocol and this client (penstock {ours}) \
             version 2: install penstock 9.9.9 for this client"
        ),
    );
}

/// A newer penstock's commands can stop any broker.
#[test]
fn a_broker_of_any_version_is_asked_to_stop_and_nothing_else() {
    let mut bench = SessionBench::new();
    bench.ask(Query::Stop);
    bench.meet(1, proto::Welcome::default()).unwrap();
    assert_eq!(bench.sent(), "query 1");

    let mut bench = SessionBench::new();
    bench.ask(Query::Stop);
    bench.ask(Query::Message(MessageId([1; 16])));
    let end = bench.meet(1, proto::Welcome::default());
    assert!(matches!(end, Err(LinkEnd::Hopeless(..))), "{end:?}");
}

fn answer(answer: Answer) -> proto::ToClient {
    proto::ToClient {
        answers: vec![(0, answer).into()],
        ..Default::default()
    }
}

#[test]
fn a_local_client_ends_an_older_broker_and_begins_one_of_its_own() {
    for works in [false, true] {
        let mut bench = SessionBench::of_versions(Versions::TODAY, true);
        if works {
            let sink = LoggingSink {
                name: "worker",
                keys: HashMap::new(),
                log: Arc::clone(&bench.log),
            };
            bench.session.consume(takes("mail", 3), Arc::new(sink));
        }
        bench.meet(1, proto::Welcome::default()).unwrap();
        bench.commit("c", None);
        assert_eq!(bench.sent(), "query 0", "nothing else is said to it");
        bench.told(answer(Answer::Stopping)).unwrap();
        assert_eq!(bench.sent(), "");
        // The broker still listens briefly while it exits.
        for _ in 0..2 {
            let end = bench.told_to_go(proto::close::Why::Stopping);
            assert_eq!(end, LinkEnd::Lost("the broker was stopped".into()));
            let start = match works {
                true => BrokerStart::WhereItWas,
                false => BrokerStart::Anywhere,
            };
            assert_eq!(bench.session.start(false), start);
            bench.session.connected(bench.now, Vec::new());
            bench.sent();
        }
        bench.connect(0);
        let consume = if works { "; consume mail +3" } else { "" };
        assert_eq!(bench.sent(), format!("commit 1-1 0 ops{consume}"));
        // From now on, a stop is not undone.
        bench.confirm(1, Vec::new(), Vec::new());
        bench.told_to_go(proto::close::Why::Stopping);
        assert_eq!(bench.session.start(false), BrokerStart::No);
    }
}

#[test]
fn an_older_broker_that_refuses_to_end_is_spoken_to_in_its_version_or_not_at_all() {
    let refused = || answer(Answer::Refused("send its process SIGTERM".into()));
    let mut bench = SessionBench::of_versions(FROM_1, true);
    bench.commit("c", None);
    bench.meet(1, proto::Welcome::default()).unwrap();
    assert_eq!(bench.sent(), "query 0");
    bench.told(refused()).unwrap();
    assert_eq!(bench.sent(), "commit 1-1 0 ops");

    let mut bench = SessionBench::of_versions(Versions::TODAY, true);
    bench.meet(1, proto::Welcome::default()).unwrap();
    let end = bench.told(refused()).unwrap_err();
    assert!(
        matches!(&end, LinkEnd::Hopeless(_, why) if why.contains("speaks version 1")),
        "{end:?}"
    );
}

/// The next broker knows the session from the older one, which had forgotten it.
#[test]
fn what_an_older_broker_says_of_the_past_is_heard_before_it_ends() {
    let mut bench = SessionBench::of_versions(Versions::TODAY, true);
    bench.connect(0);
    bench.commit("known", None);
    bench.commit("lost", None);
    assert_eq!(bench.sent(), "commit 1-2 0 ops");
    bench.confirm(1, Vec::new(), Vec::new());
    assert_eq!(bench.heard(), "known: applied");
    bench.session.disconnected("test");
    let forgotten = proto::Welcome {
        forgotten: true,
        applied_through: 2,
        ..Default::default()
    };
    bench.meet(1, forgotten).unwrap();
    assert_eq!(bench.heard(), "lost: unknown");
}
