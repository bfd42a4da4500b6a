//! Records of earlier programs are read exactly. `tests/golden` has the records of many brokers' lives, each with its
//! script, and with a description of the broker that recovers from them.
//!
//! Committed files are never regenerated. For a new kind of event, or a new version of records, add a script to
//! [`LIVES_2`] and run `MAKE_GOLDEN=1 cargo test -p penstock-broker golden`, which writes the missing files.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use penstock_broker::BrokerOptions;

use crate::script::ScriptWorld;

const LIVES: &[(&str, &str)] = &[
    ("nothing", "a hello\n a bye"),
    (
        "waiting",
        "a hello
        a publish one; publish two priority=9; publish three task=other queue=other
        a publish four queue=default+other deliveries=1
        a publish large bytes=3000",
    ),
    (
        "delayed-and-expiring",
        "a hello
        a publish soon after=50; publish later at=90000000
        a publish short expires=40; publish long expires=90000000
        a publish dated expires-at=80000000 no-result",
    ),
    (
        "leased",
        "a hello
        a publish one; publish two; publish three
        w hello
        w consume default 2",
    ),
    (
        "settled",
        "a hello
        a publish one; publish two; publish three
        w hello
        w consume default 3
        w ack one; put one yes
        w ack two; put two no failed ttl=100",
    ),
    (
        "returned-and-crashed",
        "a hello
        a publish one; publish two; publish three deliveries=1; publish four
        w hello
        w consume default 4
        w return one
        w crash two reason=signal-9
        w crash three reason=signal-11",
    ),
    (
        "retried",
        "a hello
        a publish one; publish two; publish three
        w hello
        w consume default 3
        w move one next note=first after=60000
        w move two next note=first
        w move three queue=dead note=boom expires=90000000",
    ),
    (
        "retried-again",
        "a hello
        a publish one
        w hello
        w consume default 1
        w move one next note=first
        w consume default 1
        w move one next note=second after=100000",
    ),
    (
        "values",
        "a hello
        a put lock me; put counter 7 ttl=100000; put large x bytes=2000
        a put gone x; delete gone
        a put short x ttl=10
        wait 20",
    ),
    (
        "values-over-the-cap",
        "a hello
        w hello
        w consume default 9
        a publish one; publish two; publish three; publish four
        w ack one; put one x bytes=400; ack two; put two x bytes=400 group=other
        w ack three; put three x bytes=400
        w ack four; put four x bytes=300",
    ),
    (
        "claimed",
        "a hello
        a publish one unless=lock
        a publish two unless=lock
        a publish three",
    ),
    (
        "join",
        "a hello
        a hold join count=3 messages=held+also; publish one; publish two
        a join join index=0
        a join join index=2",
    ),
    (
        "join-released",
        "a hello
        a hold join count=1 messages=held
        a hold other count=2 messages=late all-ended
        a join join index=0
        a join other index=0 failed; join other index=1",
    ),
    (
        "join-failed",
        "a hello
        a hold join count=2 messages=held
        a join join index=1 failed",
    ),
    (
        "paused-and-limited",
        "a hello
        a publish one; publish two queue=other
        a pause other
        a pause default
        a resume default
        a limit default length=2 size=4000
        a limit other length=3 drop-oldest",
    ),
    (
        "dropped-for-room",
        "a hello
        a limit default length=2 drop-oldest
        a publish one
        a publish two
        a publish three",
    ),
    (
        "purged",
        "a hello
        a publish one; publish two; publish three queue=other
        a purge default",
    ),
    (
        "refused",
        "a hello
        a guard lock present; publish one
        a put lock me
        a guard lock absent; publish two
        a guard lock me; publish three",
    ),
    (
        "sent-again",
        "a hello
        a publish one
        a lost
        a hello last=0
        a seq=1 publish one
        a publish two",
    ),
    (
        "sessions-that-left",
        "a hello
        b hello
        w hello
        a publish one; publish two
        w consume default 1
        w lost
        a bye
        b lost
        wait 1000
        c hello
        c publish three",
    ),
    (
        "forgotten",
        "a hello
        a publish one
        a bye
        wait 40001
        b hello
        b publish two",
    ),
    (
        "several-brokers",
        "a hello
        a publish one; publish two
        w hello
        w consume default 1
        kill
        a hello
        a publish three
        w hello one
        w consume default 2
        w ack one; put one yes
        power-cut
        a hello
        a publish four",
    ),
    (
        "clock-set",
        "a hello
        a publish one after=5000; publish two at=9000; publish three expires=7000
        wall 100000
        kill
        a hello
        a publish four after=5000
        wall -100000",
    ),
    (
        "carried-forward",
        "a hello
        a publish one; publish two priority=2; publish three after=60000
        a publish four queue=default+other; publish five unless=lock
        a hold join count=2 messages=held; put k1 v; put k2 v ttl=100000
        a join join index=1
        w hello
        w consume default 2
        w move four next note=first after=50000
        w crash one reason=signal-9
        a pause other
        a limit other length=9
        carry
        a publish six",
    ),
    (
        "in-parts",
        "a hello
        a part more publish one
        a part more publish two
        a part last publish three",
    ),
];

/// Lives that are only possible with format 2.
const LIVES_2: &[(&str, &str)] = &[
    (
        "schedules",
        "a hello
        a set poll every=60000; set gone every=60000; declare nightly cron=30_2_*_*_* zone=Europe/Paris version=7 started=1700000000000 catch-up=all
        a set nightly at=90000000 jitter=500 queue=mail priority=7 expires=5000 deliveries=1 retries=2 no-result; schedule nightly pause
        a declare named every=90000 version=v2 overlap=queue
        a unschedule gone
        wait 60000
        wait 30000
        wait 30000
        wait 60000",
    ),
    (
        "steps",
        "a hello
        a hold o/ count=2 messages=sum inputs=list workflow=sum max-failures=1 result=90000
        a hold i/ count=3 then=o/:0 result=90000 all-ended; hold e/ count=2 messages=rescue inputs=list when=failed
        a publish i/0 member=i/:0; publish i/1 member=i/:1; publish e/0 member=e/:0; publish later after=90000
        a hold k/ count=1 messages=next inputs=one; publish k/0 member=k/:0
        w hello
        w consume default 4
        w ack i/0; put i/0 yes
        w fail i/1 class=ValueError
        w fail e/0
        w ack k/0; put k/0 value
        a join i/ index=2 failed
        a cancel all workflow=other reason=why
        w consume default 1",
    ),
    (
        "steps-carried",
        "a hello
        a hold o/ count=2 messages=sum inputs=list workflow=sum max-failures=1 result=90000
        a hold i/ count=3 then=o/:0 result=90000 all-ended; hold e/ count=2 messages=rescue inputs=list when=failed
        a publish i/0 member=i/:0; publish i/1 member=i/:1; publish e/0 member=e/:0; publish later after=90000
        a hold k/ count=1 messages=next inputs=one; publish k/0 member=k/:0
        w hello
        w consume default 4
        w ack i/0; put i/0 yes
        w fail i/1 class=ValueError
        w fail e/0
        w ack k/0; put k/0 value
        a join i/ index=2 failed
        a cancel all workflow=other reason=why
        carry
        w consume default 1",
    ),
    (
        "workflows",
        "a hello
        a open sum name=nightly steps=tree deadline=90000 kept=5000 parent=job; hold g/ count=2 messages=sum inputs=list workflow=sum; publish g/0 member=g/:0 workflow=sum no-result; publish g/1 member=g/:1 workflow=sum no-result
        a open alone; publish alone workflow=alone; open later deadline-at=99000; publish later workflow=later after=1000
        w hello
        w consume default 3
        w ack g/0
        w ack alone
        mark
        carry 2
        w fail g/1
        a retry alone
        a cancel later",
    ),
    (
        "workflows-carried",
        "a hello
        a open sum name=nightly steps=tree deadline=90000 kept=5000 parent=job; hold g/ count=2 messages=sum inputs=list workflow=sum; publish g/0 member=g/:0 workflow=sum no-result; publish g/1 member=g/:1 workflow=sum no-result
        a open alone; publish alone workflow=alone
        w hello
        w consume default 3
        w ack g/0
        w fail alone
        carry
        a publish later workflow=alone",
    ),
    (
        "graph",
        "a hello
        a hold e/ count=1 messages=last inputs=one expects=0:ended; hold t/ count=1 messages=page inputs=one member=e/:0
        a hold s/ count=2 messages=t/0 inputs=list member=t/:0 expects=0:failed+1:ended; hold n/ count=0 then=s/:1 result=90000
        a publish s/0 member=s/:0
        a hold x/ count=2 messages=one inputs=one expects=1:failed; hold y/ count=1 messages=two inputs=one
        a hold u/ count=1 then=x/:0+y/:0 result=90000; publish u/0 member=u/:0
        w hello
        w consume default 2
        w ack s/0; put s/0 yes
        w ack u/0; put u/0 value
        w consume default 1",
    ),
    (
        "later-steps",
        "a hello
        a hold g/ count=1 messages=soon inputs=one later=5000 later-expires=60000; publish g/0 member=g/:0
        a hold i/ count=1 messages=dated later-at=70000; publish i/0 member=i/:0
        a hold k/ count=1 messages=rescue when=failed later=5000; publish k/0 member=k/:0
        a hold l/ count=1 messages=held later=5000; publish l/0 member=l/:0
        a hold m/ count=1 messages=short later-expires=5000; publish m/0 member=m/:0
        w hello
        w consume default 4
        w ack g/0; put g/0 yes
        w ack i/0
        w fail k/0",
    ),
    (
        "deadlines",
        "a hello
        a open c1 deadline=5000; publish c1 workflow=c1
        a open g/ deadline-at=60; hold g/ count=2 messages=rescue when=failed workflow=g/; publish g/0 member=g/:0 workflow=g/; publish g/1 member=g/:1 workflow=g/
        a open c2 deadline=20; publish c2 workflow=c2 queue=other
        w hello
        w consume default+other 2
        w fail c1 boom
        w ack c2
        wait 60
        a retry c1
        a open c3; publish c3 workflow=c3 queue=other",
    ),
    (
        "deadlines-carried",
        "a hello
        a open c1 deadline=50; publish c1 workflow=c1
        a open c2 deadline=50; publish c2 workflow=c2
        w hello
        w consume default 1
        w fail c1 boom
        wait 60
        a retry c1
        disk no-settlements
        carry",
    ),
    (
        "graph-carried",
        "a hello
        a hold e/ count=1 messages=last inputs=one expects=0:ended; hold t/ count=2 messages=page inputs=one member=e/:0
        a hold s/ count=1 messages=t/0 inputs=list member=t/:0 expects=0:failed
        a publish s/0 member=s/:0; publish t/1 member=t/:1 after=90000
        w hello
        w consume default 1
        carry 4
        w ack s/0; put s/0 yes
        a hold r/ count=1 messages=u/0 inputs=one expects=0:failed; publish r/0 member=r/:0",
    ),
    (
        "machine-started",
        "boot
        a hello
        a publish soon after=10000
        wait 1000
        boot
        wait 1000",
    ),
    (
        "failed",
        "a hello
        a publish one headers=a:b retries=3; publish two; publish three deliveries=1 unless=k
        w hello
        w consume default 3
        w fail one class=ValueError message=bad preview=x=1 note=first
        w crash three reason=signal-11
        a retry one
        w consume default 1
        w fail one note=second
        carry",
    ),
    (
        "group-retried",
        "a hello
        a hold o/ count=2 messages=last inputs=list result=90000000
        a hold i/ count=2 then=o/:1 result=90000000 max-failures=1; publish i/0 member=i/:0; publish i/1 member=i/:1
        a hold h/ count=1 messages=body inputs=one; publish h/0 member=h/:0
        w hello
        w consume default 3
        w fail i/0; fail i/1; fail h/0
        a retry i/0
        carry
        a retry i/1; retry h/0
        w consume default 1
        w fail i/0
        a drop h/0",
    ),
    (
        "failed-and-dropped",
        "a hello
        a publish one; publish two; publish three; publish four
        w hello
        w consume default 4
        w fail one; fail two; fail three; fail four
        a drop one
        a drop all class=Other
        a retry three to=other
        disk no-publishes",
    ),
    (
        "ended",
        "a hello
        a publish one expires=10; publish two; publish three after=500; publish four queue=other
        a cancel two reason=why
        wait 10
        a purge default
        carry
        a cancel all queue=other",
    ),
    (
        "ended-for-room",
        "a hello
        a limit default length=1 drop-oldest
        a publish m1; publish m2; publish m3; publish m4; publish m5; publish m6; publish m7; publish m8
        a publish n1; publish n2; publish n3; publish n4; publish n5; publish n6; publish n7; publish n8
        a publish o1; publish o2; publish o3; publish o4; publish o5; publish o6; publish o7; publish o8",
    ),
    (
        "purged-while-it-ran",
        "a hello
        a publish one; publish two
        w hello
        w consume default 1
        a purge default
        w return one",
    ),
    (
        "suspected",
        "a hello
        a publish one; publish two deliveries=1; publish three headers=tenant:north; publish four
        w hello
        w consume default 3
        w suspect one reason=why; suspect two; suspect three
        w consume default 1
        a purge default
        w suspect one reason=again",
    ),
    (
        "suspected-and-carried",
        "a hello
        a publish one; publish two headers=tenant:north; publish three
        w hello
        w consume default 2
        w suspect one reason=why; suspect two
        carry",
    ),
    (
        "cancel-asked",
        "a hello
        a publish one; publish two deliveries=1; publish three queue=other; publish four
        w hello
        w consume default+other 3
        a cancel one ask reason=why
        a cancel two kill
        a cancel one kill
        a cancel all queue=other ask reason=all",
    ),
    (
        "cancel-asked-and-over",
        "a hello
        a publish one; publish two; publish three; publish four; publish five no-result
        w hello
        w consume default 5
        a cancel all ask reason=why
        w ack one; put one yes
        w return two
        w move three next note=first
        w fail four
        w crash five",
    ),
    (
        "cancel-asked-and-carried",
        "a hello
        a publish one; publish two
        w hello
        w consume default 2
        a cancel one ask reason=why
        a cancel two kill
        carry
        w lost
        a publish three",
    ),
    (
        "members",
        "a hello
        a hold outer count=1 messages=last; hold join count=2 messages=mid member=outer:0
        a hold any count=2 messages=after all-ended
        a publish one member=join:0; publish two member=join:1; publish three member=any:0; publish four member=any:1
        w hello
        w consume default 4
        w ack one; put one yes
        carry
        w fail two
        w crash three
        w ack four",
    ),
    (
        "growing",
        "a hello
        a hold g/ unsealed=sum messages=sum inputs=list workflow=sum result=90000
        a publish g/0 member=g/:0 workflow=sum; publish g/1 member=g/:1 workflow=sum
        w hello
        w consume default 1
        w ack g/0; put g/0 one",
    ),
    (
        "replaced",
        "a hello
        a hold j/ count=1 messages=next inputs=one workflow=next; open next; publish j/0 member=j/:0 workflow=next
        a publish r; publish s unless=only; publish t; open t; publish t/0
        w hello
        w consume default 4
        w replace j/0; hold u/ count=2 then=j/:0 result=90000; publish u/0 member=u/:0 workflow=next; publish u/1 member=u/:1 workflow=next queue=other
        w replace r; hold v/ count=1 takes=r result=90000; publish v/0 member=v/:0 queue=other
        w replace s; publish s task=other queue=other after=20
        w consume default 2
        w ack t; put t one; publish spawned",
    ),
    (
        "unclaimed",
        "a hello
        a publish r unless=k; publish s unless=l
        w hello
        w consume default 4
        w replace r; hold u/ count=1 messages=r result=90000; publish u/0 member=u/:0
        w replace s; hold v/ count=1 messages=s result=90000; publish v/0 member=v/:0 queue=other
        w fail u/0",
    ),
    (
        "claims",
        "a hello
        a publish one claim=k until=start; publish two claim=l; publish three claim=m for=60000
        a publish four claim=n until=start conflict=5000 after=2000
        wait 1000
        a publish five claim=n until=start conflict=5000 after=2000
        a publish six claim=l conflict=refuse
        w hello
        w consume default 2
        a publish seven claim=k until=start conflict=replace queue=other
        mark
        carry
        a publish eight claim=k until=start conflict=replace queue=other",
    ),
    (
        "growing-carried-and-cancelled",
        "a hello
        a hold g/ unsealed=g/ result=90000; publish g/0 member=g/:0 workflow=g/
        b hello
        b hold h/ unsealed=body messages=body workflow=body; publish h/0 member=h/:0 workflow=body; publish h/1 member=h/:1 workflow=body
        c hello
        c hold i/ unsealed=i/ creator=h/0 result=90000; publish i/0 member=i/:0 workflow=i/
        carry
        a publish g/1 member=g/:1 workflow=g/
        a seal g/ count=2
        w hello
        w consume default 1
        b bye
        w fail g/0 boom",
    ),
];

struct Golden {
    script: String,
    /// Bytes of each record; `None` if it was reclaimed.
    records: Vec<Option<Vec<u8>>>,
    /// Commands for the recovered broker, and its outputs.
    then: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn world() -> ScriptWorld {
    ScriptWorld::new(BrokerOptions {
        results_cap_bytes: 1_000,
        session_memory_ms: 40_000,
        ..BrokerOptions::default()
    })
}

/// Returns the world at the end of a script.
fn live(script: &str) -> ScriptWorld {
    let mut world = world();
    for line in script.lines() {
        world.run(line.trim());
    }
    world
}

const WORKFLOWS: &str = "g workflows";

/// Describes everything visible about the world: its status, all its hand-outs, and the events as time passes.
fn seen(world: &mut ScriptWorld) -> String {
    let (messages, keys) = world.names();
    let mut lines = vec!["g hello".to_owned(), "g status".to_owned()];
    lines.push(WORKFLOWS.to_owned());
    lines.extend(messages.iter().map(|name| format!("g info {name}")));
    lines.push(format!("g watch {} {}", messages.join(" "), keys.join(" ")));
    // The broker gives up on disconnected clients, so their leases return.
    lines.push("wait 16000".to_owned());
    lines.push("g consume default+other+dead 100".to_owned());
    lines.push("g resume other".to_owned());
    lines.push("wait 100000".to_owned());
    lines.push("wait 100000000".to_owned());
    lines.push("g status".to_owned());
    let mut text = String::new();
    for line in lines {
        let outputs = world.run(line.trim());
        // Most lives have no workflows, and were written before anything could ask for them.
        if line == WORKFLOWS && outputs == [WORKFLOWS] {
            continue;
        }
        writeln!(text, "{}", line.trim()).expect("a string takes it");
        for output in outputs {
            writeln!(text, "    -> {output}").expect("a string takes it");
        }
    }
    text
}

impl Golden {
    fn made_from(script: &str) -> Self {
        let mut world = live(script);
        world.run("restart");
        let records = world.journal();
        Self {
            script: script
                .lines()
                .map(|line| format!("{}\n", line.trim()))
                .collect(),
            records,
            then: seen(&mut world),
        }
    }

    fn read(text: &str) -> Self {
        let (script, rest) = text.split_once("== records\n").expect("it has records");
        let (records, then) = rest.split_once("== then\n").expect("it says what follows");
        let record = |line: &str| {
            (line != "reclaimed").then(|| {
                let digits = |at: usize| &line[at..at + 2];
                let byte = |at| u8::from_str_radix(digits(at), 16).expect("hexadecimal digits");
                (0..line.len()).step_by(2).map(byte).collect()
            })
        };
        Self {
            script: script.to_owned(),
            records: records.lines().map(record).collect(),
            then: then.to_owned(),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{}== records\n", self.script);
        for record in &self.records {
            match record {
                Some(bytes) => text.extend(bytes.iter().map(|byte| format!("{byte:02x}"))),
                None => text += "reclaimed",
            }
            text.push('\n');
        }
        text + "== then\n" + &self.then
    }
}

fn golden() -> BTreeMap<String, Golden> {
    let mut found = BTreeMap::new();
    for version in fs::read_dir(root()).expect("tests/golden") {
        for file in fs::read_dir(version.expect("an entry").path()).expect("a directory") {
            let path = file.expect("an entry").path();
            let text = fs::read_to_string(&path).expect("a text");
            let name = path.strip_prefix(root()).expect("it is in there");
            found.insert(name.display().to_string(), Golden::read(&text));
        }
    }
    found
}

#[test]
fn golden_records_of_every_version_are_recovered_exactly() {
    if std::env::var_os("MAKE_GOLDEN").is_some() {
        // A program writes the format of its time; earlier lives stay as they are.
        for (name, script) in LIVES_2 {
            let path = root().join(format!("version-2/{name}.txt"));
            if !path.exists() {
                fs::create_dir_all(path.parent().expect("a directory")).expect("it is made");
                fs::write(&path, Golden::made_from(script).text()).expect("it is written");
            }
        }
    }
    let all = golden();
    for (name, _) in LIVES.iter().chain(LIVES_2) {
        let is_there = all
            .keys()
            .any(|file| file.ends_with(&format!("/{name}.txt")));
        assert!(is_there, "{name} was never written: set MAKE_GOLDEN");
    }
    for (file, golden) in all {
        // The current program repeats the same life, for the clock and the names. The committed records replace its
        // own.
        let mut world = live(&golden.script);
        world.become_what_wrote(golden.records);
        let then = seen(&mut world);
        assert!(
            then == golden.then,
            "{file}: expected\n{}\nbut it is\n{then}",
            golden.then
        );
        world.check_recovery();
    }
}
