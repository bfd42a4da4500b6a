//! Sets the wall clock of processes, with libfaketime.

use std::path::Path;
use std::process::Command;

/// Directory in which libfaketime keeps the state that processes with one clock share.
const SHARED: &str = "/dev/shm";

/// Whether [`wall_clock`] is available. Without it a test is skipped, except in CI, which installs it: there
/// the test fails.
pub fn has_wall_clock() -> bool {
    let found = preload().is_some();
    let is_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(
        found || !is_ci,
        "this needs faketime, which .ci/run installs"
    );
    found
}

/// Returns the environment of a process at another time: `+7200s`, `@2026-01-15 12:05:00`. Its steady clock is
/// the true one, because the kernel ends waits by that clock. The process is not a child of the `faketime`
/// program, which would have to be killed too.
pub fn wall_clock(setting: &str) -> [(&'static str, String); 3] {
    [
        (
            "LD_PRELOAD",
            preload().expect("faketime is there (Debian: apt-get install faketime)"),
        ),
        ("FAKETIME", setting.to_owned()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ]
}

fn preload() -> Option<String> {
    remove_stale_shares();
    let told = Command::new("faketime")
        .args(["now", "printenv", "LD_PRELOAD"])
        .output();
    let library = String::from_utf8(told.ok()?.stdout).ok()?;
    Some(library.trim().to_owned()).filter(|library| !library.is_empty())
}

/// Removes the shared memory of killed processes. A killed process leaves its share, and libfaketime ends the
/// next process with the same number with "shm_open failed: File exists" (its README, "Cleaning up shared
/// memory").
fn remove_stale_shares() {
    let Ok(shared) = Path::new(SHARED).read_dir() else {
        return;
    };
    for one in shared.flatten() {
        let name = one.file_name();
        let name = name.to_string_lossy();
        let pid = ["faketime_shm_", "sem.faketime_sem_"]
            .iter()
            .find_map(|kind| name.strip_prefix(kind));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Another test may have been faster.
            let _ = std::fs::remove_file(one.path());
        }
    }
}
