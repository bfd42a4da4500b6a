//! The zygote allocates nothing between two forks: what it writes to, and what its children share, would be copied.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;

use penstock_worker::{Forks, ZygoteTurn};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// System's allocator, with a count of each thread's calls.
struct CallCounter;

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: it passes all calls on.
unsafe impl GlobalAlloc for CallCounter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller keeps the rules.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        CALLS.set(CALLS.get() + 1);
        // SAFETY: the caller keeps the rules.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static CALL_COUNTER: CallCounter = CallCounter;

/// Calls this thread makes to the allocator in `this`.
fn calls_in<T>(this: impl FnOnce() -> T) -> (T, usize) {
    let before = CALLS.get();
    let done = this();
    (done, CALLS.get() - before)
}

/// Forks, until the supervisor is gone. Returns the number of children, and of calls to the allocator.
#[expect(clippy::zombie_processes, reason = "the next turn reaps them")]
fn serve(mut forks: Forks) -> (usize, usize) {
    let (mut children, mut calls) = (0, 0);
    loop {
        let (turn, more) = calls_in(|| forks.next_turn().unwrap());
        calls += more;
        match turn {
            ZygoteTurn::Signal => {}
            ZygoteTurn::Leave => return (children, calls),
            ZygoteTurn::Fork(request) => {
                let child = Command::new("true").process_group(0).spawn().unwrap();
                let forked = || forks.forked(request.child, child.id() as i32).unwrap();
                calls += calls_in(forked).1;
                children += 1;
            }
        }
    }
}

fn ask_for_fork(supervisor: &UnixStream, reply: &UnixStream, child: u32) {
    let command = format!("fork {child} 0 process 1 once");
    let length = (command.len() as u32).to_le_bytes();
    let descriptors = [reply.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    assert!(attached.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let pieces = [IoSlice::new(&length), IoSlice::new(command.as_bytes())];
    sendmsg(supervisor, &pieces, &mut attached, SendFlags::empty()).unwrap();
}

fn hear(from: &mut UnixStream) -> String {
    let mut length = [0; 4];
    from.read_exact(&mut length).unwrap();
    let mut text = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut text).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn forks_and_deaths_allocate_nothing() {
    const CHILDREN: u32 = 20;
    let (ours, mut supervisor) = UnixStream::pair().unwrap();
    let (reply, _theirs) = UnixStream::pair().unwrap();
    let forks = Forks::new(ours.into()).unwrap();
    let zygote = thread::spawn(move || serve(forks));
    for child in 0..CHILDREN {
        ask_for_fork(&supervisor, &reply, child);
        let told = hear(&mut supervisor);
        assert!(told.starts_with(&format!("forked {child} ")), "{told}");
        let told = hear(&mut supervisor);
        assert!(told.starts_with(&format!("died {child} ")), "{told}");
    }
    supervisor.shutdown(Shutdown::Write).unwrap();
    assert_eq!(zygote.join().unwrap(), (CHILDREN as usize, 0));
}
