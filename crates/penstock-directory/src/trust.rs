//! Checks the owner of a directory, and of a broker.
//!
//! A client sends its jobs to the broker of PATH, and a worker runs the jobs that this broker delivers. So a user who
//! can put a broker or a journal into PATH can read another user's jobs, and run tasks as that user. Directories above
//! PATH may belong to others: a user who puts PATH there trusts their owners.

use std::fs::{self, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const ROOT: u32 = 0;
const WRITABLE_BY_GROUP: u32 = 0o020;
const WRITABLE_BY_ALL: u32 = 0o002;
/// Mode bit of a directory whose entries only their owners can rename and remove.
const STICKY: u32 = 0o1000;

/// User and group of this process.
#[derive(Clone, Copy, Debug)]
struct Identity {
    user: u32,
    group: u32,
}

impl Identity {
    fn of_this_process() -> Self {
        Self {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
        }
    }
}

/// Refuses a directory that another user owns or can change. A missing directory is fine. The path has no links in it,
/// so a link was created after it was resolved, or leads nowhere.
pub(crate) fn check_directory(directory: &Path) -> io::Result<()> {
    let us = Identity::of_this_process();
    if let Some(found) = existing(fs::symlink_metadata(directory))? {
        check_own(directory, &found, us)?;
    }
    let above = directory.ancestors().skip(1);
    for (distance, ancestor) in above.enumerate() {
        if let Some(found) = existing(fs::metadata(ancestor))? {
            check_above(directory, ancestor, &found, distance == 0, us)?;
        }
    }
    Ok(())
}

fn existing(found: io::Result<Metadata>) -> io::Result<Option<Metadata>> {
    match found {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some),
    }
}

fn check_own(directory: &Path, found: &Metadata, us: Identity) -> io::Result<()> {
    let shown = directory.display();
    if found.is_symlink() {
        return Err(refused(format!(
            "{shown} is a symbolic link that leads nowhere, or was put there a moment ago. Nothing was sent or changed. \
             Remove it, or choose another directory with PENSTOCK_URL=local:PATH"
        )));
    }
    if found.uid() != us.user {
        return Err(refused(format!(
            "{shown} belongs to user {}, and this process runs as user {}: the owner could read its jobs and have \
             tasks run as this user. Nothing was sent or changed. Run it as user {}, or choose a directory of your \
             own with PENSTOCK_URL=local:PATH",
            found.uid(),
            us.user,
            found.uid()
        )));
    }
    if found.mode() & (WRITABLE_BY_GROUP | WRITABLE_BY_ALL) != 0 {
        return Err(refused(format!(
            "other users may write in {shown} (mode {:04o}): they could read its jobs and have tasks run as this \
             user. Nothing was sent or changed. If everything in it is yours, run: chmod go-w {shown}. Otherwise \
             choose another directory with PENSTOCK_URL=local:PATH",
            found.mode() & 0o7777
        )));
    }
    Ok(())
}

/// Refuses a directory above PATH that others can change. The group of the parent may be the user's own: where each
/// user has a group, many systems make directories writable by it. Further up, only write access for everybody is
/// refused.
fn check_above(
    directory: &Path,
    above: &Path,
    found: &Metadata,
    is_parent: bool,
    us: Identity,
) -> io::Result<()> {
    let by_all = found.mode() & WRITABLE_BY_ALL != 0;
    let by_group = found.mode() & WRITABLE_BY_GROUP != 0
        && is_parent
        && found.gid() != us.group
        && found.gid() != ROOT;
    if found.mode() & STICKY != 0 || !(by_all || by_group) {
        return Ok(());
    }
    let (directory, shown) = (directory.display(), above.display());
    let (who, change) = match by_all {
        true => ("all users".to_owned(), "o-w"),
        false => (format!("members of group {}", found.gid()), "g-w"),
    };
    Err(refused(format!(
        "{who} may write in {shown} (mode {:04o}), so they could replace {directory} with a directory of their own. \
         Nothing was sent or changed. Run: chmod {change} {shown} (or chmod +t {shown}), or choose another directory \
         with PENSTOCK_URL=local:PATH",
        found.mode() & 0o7777
    )))
}

/// Refuses a broker that another user runs, unless that is root. Nothing has been sent to it yet.
pub(crate) fn check_peer(socket: impl AsFd, path: &Path) -> io::Result<()> {
    let user = peer_user(socket, path)?;
    let us = Identity::of_this_process().user;
    if user == us || user == ROOT {
        return Ok(());
    }
    Err(refused(format!(
        "user {user} listens on {}, and this process runs as user {us}. Nothing was sent. Find out who that is, or \
         choose another directory with PENSTOCK_URL=local:PATH",
        path.display()
    )))
}

#[cfg(target_os = "linux")]
fn peer_user(socket: impl AsFd, _: &Path) -> io::Result<u32> {
    use std::os::fd::AsRawFd;
    // Not rustix's function: its process id can't be 0, as it is here for a process in another container, and it would
    // take the answer for an error.
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes there, and any bytes are a valid `ucred`.
    let outcome = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &mut len,
        )
    };
    match outcome {
        0 => Ok(peer.uid),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the owner of the socket's file, who has bound it.
#[cfg(not(target_os = "linux"))]
fn peer_user(_: impl AsFd, path: &Path) -> io::Result<u32> {
    Ok(fs::symlink_metadata(path)?.uid())
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_is_used_only_where_no_other_user_can_change_it() {
        let top = tempfile::tempdir().unwrap();
        let above = top.path().join("above");
        let parent = above.join("parent");
        let data = parent.join("data");
        let check = |modes: [u32; 3], expected: &str| {
            fs::create_dir_all(&data).unwrap();
            for (path, mode) in [&above, &parent, &data].into_iter().zip(modes) {
                set_mode(path, mode);
            }
            let said = check_directory(&data).map_err(|error| error.to_string());
            match said {
                Ok(()) => assert_eq!("", expected, "{modes:?}"),
                Err(said) => assert!(
                    !expected.is_empty() && said.contains(expected),
                    "{modes:?}: {said}"
                ),
            }
            let kept = [&above, &parent, &data].map(|path| fs::metadata(path).unwrap().mode());
            assert_eq!(kept.map(|mode| mode & 0o7777), modes, "nothing is changed");
        };
        let chmod = |change: &str, path: &Path| format!("chmod {change} {}", path.display());
        check([0o700, 0o700, 0o700], "");
        // Others may reach it and look inside; its content is for its owner only.
        check([0o755, 0o755, 0o755], "");
        check([0o755, 0o755, 0o775], &chmod("go-w", &data));
        check([0o755, 0o755, 0o757], &chmod("go-w", &data));
        check([0o755, 0o755, 0o1777], &chmod("go-w", &data));
        check([0o755, 0o777, 0o700], &chmod("o-w", &parent));
        check([0o755, 0o1777, 0o700], "");
        check([0o777, 0o755, 0o700], &chmod("o-w", &above));
        check([0o1777, 0o755, 0o700], "");
        // A new directory has the group of this process.
        check([0o775, 0o775, 0o700], "");

        fs::remove_dir(&data).unwrap();
        std::os::unix::fs::symlink("nowhere", &data).unwrap();
        let said = check_directory(&data).unwrap_err().to_string();
        assert!(said.contains("leads nowhere"), "{said}");
        fs::remove_file(&data).unwrap();
        set_mode(&above, 0o755);
        set_mode(&parent, 0o777);
        assert!(
            check_directory(&data).is_err(),
            "another user could make it first"
        );
        set_mode(&parent, 0o1777);
        check_directory(&data).unwrap();
    }

    #[test]
    fn a_parent_that_another_group_may_write_is_refused_unless_it_is_sticky() {
        let parent = tempfile::tempdir().unwrap();
        let found = |mode| {
            set_mode(parent.path(), mode);
            fs::metadata(parent.path()).unwrap()
        };
        let data = parent.path().join("data");
        let check = |mode, is_parent, is_ours| {
            let found = found(mode);
            let group = if is_ours {
                found.gid()
            } else {
                found.gid() + 1
            };
            let us = Identity { user: 7, group };
            check_above(&data, parent.path(), &found, is_parent, us).is_ok()
        };
        if rustix::process::geteuid().is_root() {
            // Members of root's own group are trusted.
            std::os::unix::fs::chown(parent.path(), None, Some(65_534)).unwrap();
        }
        assert!(check(0o775, true, true));
        assert!(check(0o1775, true, false));
        assert!(check(0o775, false, false));
        assert!(!check(0o775, true, false));
    }

    #[test]
    fn a_broker_of_this_user_may_be_spoken_to() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        check_peer(UnixStream::connect(&path).unwrap(), &path).unwrap();
    }
    /// Only root can act as two users, as in CI. For other users this test checks nothing.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_directory_and_a_broker_of_another_user_are_refused_with_both_named() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        use rustix::process::{Uid, geteuid};
        use rustix::thread::set_thread_res_uid;
        if !geteuid().is_root() {
            let must = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!must, "CI must run this as root, to act as two users");
            eprintln!("skipped: root only can act as two users");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // The kernel notes who listens. A thread has a user of its own, which ends with the thread.
        let other = Uid::from_raw(65_534);
        let as_other = |socket: &_| {
            set_thread_res_uid(other, other, other).unwrap();
            listen(socket, 1)
        };
        std::thread::scope(|scope| scope.spawn(|| as_other(&socket)).join().unwrap()).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        let said = check_peer(&stream, &path).unwrap_err().to_string();
        assert!(said.contains("user 65534 listens on"), "{said}");
        assert!(said.contains("runs as user 0"), "{said}");

        std::os::unix::fs::chown(place.path(), Some(65_534), None).unwrap();
        let said = check_directory(place.path()).unwrap_err().to_string();
        assert!(said.contains("belongs to user 65534"), "{said}");
        assert!(said.contains("runs as user 0"), "{said}");
        std::os::unix::fs::chown(place.path(), Some(12_345), None).unwrap();
        let as_owner = || {
            let owner = Uid::from_raw(12_345);
            set_thread_res_uid(owner, owner, owner).unwrap();
            check_directory(place.path())
        };
        std::thread::scope(|scope| scope.spawn(as_owner).join().unwrap()).unwrap();
    }
}
