//! The zygote's side of its link to the supervisor. A test reaps every child of this process, so they run one by one.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use penstock_worker::{Forks, ZygoteTurn};

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn forks() -> (Forks, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Forks::new(ours.into()).unwrap(), theirs)
}

fn message(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn say(to: &mut UnixStream, text: &str) {
    to.write_all(&message(text)).unwrap();
}

fn hear(from: &mut UnixStream) -> String {
    let mut length = [0; 4];
    from.read_exact(&mut length).unwrap();
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Serves until the supervisor is gone.
fn serve(forks: &mut Forks) {
    loop {
        match forks.next_turn().unwrap() {
            ZygoteTurn::Signal => {}
            ZygoteTurn::Leave => return,
            ZygoteTurn::Fork(request) => panic!("{request:?} has no socket"),
        }
    }
}

fn sleeper() -> Child {
    let mut command = Command::new("sleep");
    command.arg("600").process_group(0).spawn().unwrap()
}

#[test]
fn a_supervisor_is_understood_however_its_bytes_arrive() {
    let _alone = alone();
    let (mut forks, mut theirs) = forks();
    let fork = message("fork 7 1 thread 8 long");
    let (first, rest) = fork.split_at(9);
    say(&mut theirs, "nudge 3");
    theirs.write_all(first).unwrap();
    theirs.write_all(rest).unwrap();
    say(&mut theirs, "kill");
    theirs.shutdown(Shutdown::Write).unwrap();
    serve(&mut forks);
    // Its socket did not arrive with the command.
    let refused = "unforked 7 Too many open files (os error 24)";
    assert_eq!(hear(&mut theirs), refused);
}

#[test]
fn a_command_that_nobody_knows_ends_the_zygote() {
    let _alone = alone();
    let (mut forks, mut theirs) = forks();
    say(&mut theirs, "fork 7 1 thread");
    let Err(error) = forks.next_turn() else {
        panic!("it was understood");
    };
    assert_eq!(error.kind(), ErrorKind::InvalidData);
}

/// The reader of a process's outcomes doesn't know its id, which another process may have by then.
#[test]
fn only_the_process_that_is_meant_is_killed_and_only_while_it_is_there() {
    let _alone = alone();
    let (mut forks, mut theirs) = forks();
    let mut other = sleeper();
    let meant = sleeper().id();
    forks.forked(0, other.id() as i32).unwrap();
    forks.forked(1, meant as i32).unwrap();
    let served = thread::spawn(move || serve(&mut forks));
    assert_eq!(hear(&mut theirs), format!("forked 0 {}", other.id()));
    assert_eq!(hear(&mut theirs), format!("forked 1 {meant}"));
    say(&mut theirs, "kill 1");
    let died = hear(&mut theirs);
    assert!(died.starts_with(&format!("died 1 {meant} 9 ")), "{died}");
    say(&mut theirs, "kill 1");
    // The answer to this one shows that the one before was carried out.
    say(&mut theirs, "fork 2 0 process 1 long");
    assert!(hear(&mut theirs).starts_with("unforked 2 "));
    assert!(other.try_wait().unwrap().is_none());
    theirs.shutdown(Shutdown::Write).unwrap();
    served.join().unwrap();
    assert_eq!(other.wait().unwrap().signal(), Some(9));
}
