//! Paths of the files of `local:PATH`. Clients and the broker apply the same rule, so neither has to tell the other.
//!
//! ```text
//!     PATH/lock          held for as long as a broker runs
//!     PATH/broker.sock   where it listens, mode 0600
//!     PATH/broker.log    its log, for people
//!     PATH/journal/      what it holds
//! ```
//!
//! A socket is a file: on a full disk there may be no room for one, and the dead socket of a killed broker can't be
//! used again. Without a broker nothing is drained, and the disk stays full. So there is a second location, in memory.
//! A broker without room in PATH listens there, and clients look there when nobody listens in PATH.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

use rustix::fs::OFlags;

use crate::trust::{check_directory, check_peer};

/// File names that mark the top of a project. A relative PATH is created there, so two working directories of one
/// project share a broker.
const PROJECT_MARKS: [&str; 3] = ["pyproject.toml", "manage.py", ".git"];

/// Length of the longest path that fits the socket address of every platform we run on, without the final zero byte:
/// Linux has room for 107 bytes, macOS for 103.
const LONGEST_SOCKET_PATH: usize = if cfg!(target_os = "macos") { 103 } else { 107 };

/// Directory for sockets whose own path would be too long.
const SHORT_SOCKETS: &str = "/tmp";

/// Directory for sockets for which the disk has no room. /tmp may well be on that disk; this directory is in memory.
const SPARE_SOCKETS: &str = if cfg!(target_os = "linux") {
    "/dev/shm"
} else {
    "/tmp"
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPaths {
    /// Absolute path of the directory, without symbolic links.
    pub directory: PathBuf,
    pub socket: PathBuf,
    /// Socket on which the broker listens while the disk has no room for the regular one.
    pub spare_socket: PathBuf,
    pub lock: PathBuf,
    pub log: PathBuf,
    pub journal: PathBuf,
}

impl LocalPaths {
    /// Resolves the paths of `local:PATH`; creates nothing.
    pub fn resolve(path: &Path) -> io::Result<Self> {
        let absolute = if path.is_absolute() {
            path.to_path_buf()
        } else {
            let home = std::env::var_os("HOME").map(PathBuf::from);
            base_directory(&std::env::current_dir()?, path, home.as_deref()).join(path)
        };
        Ok(Self::new(without_links(&absolute)?))
    }

    fn new(directory: PathBuf) -> Self {
        // Not under $XDG_RUNTIME_DIR: a cron job, a login shell and a web server of one user see
        // different values of it, and must still find the same broker.
        let hash = fnv1a(directory.as_os_str().as_bytes());
        let short_name = format!("{hash:016x}.sock");
        let beside = directory.join("broker.sock");
        let socket = if beside.as_os_str().len() <= LONGEST_SOCKET_PATH {
            beside
        } else {
            shared_directory(SHORT_SOCKETS).join(&short_name)
        };
        Self {
            socket,
            spare_socket: shared_directory(SPARE_SOCKETS).join(&short_name),
            lock: directory.join("lock"),
            log: directory.join("broker.log"),
            journal: directory.join("journal"),
            directory,
        }
    }

    /// Creates PATH for this user only, with a note to git that nothing in it is to be committed.
    pub fn create_directory(&self) -> io::Result<()> {
        if self.directory.is_dir() {
            return Ok(());
        }
        let mut builder = private_directory_builder();
        if let Some(parent) = self.directory.parent() {
            builder.recursive(true).create(parent)?;
        }
        match builder.recursive(false).create(&self.directory) {
            // Another process was first, perhaps another user's: don't write there unseen.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
            Ok(()) => fs::write(self.directory.join(".gitignore"), "*\n"),
        }
    }

    /// Refuses PATH, with instructions, if another user owns it or can change its content. Both sides call it before
    /// they use anything in PATH.
    pub fn check_owner(&self) -> io::Result<()> {
        check_directory(&self.directory)?;
        // It may date from a time when others could write in PATH, or be a link to another directory.
        match self.journal.exists() {
            true => check_directory(&fs::canonicalize(&self.journal)?),
            false => Ok(()),
        }
    }

    /// Makes sure that the socket's directory exists and belongs to this user only, so that nobody else can listen
    /// instead of the broker. Both sides call it before they use the socket.
    pub fn secure_socket_directory(&self) -> io::Result<()> {
        let short = shared_directory(SHORT_SOCKETS);
        if self.socket.parent() != Some(short.as_path()) {
            return Ok(());
        }
        make_private_directory(&short)?;
        if is_private(&short)? {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{} must be a directory that only this user can enter; remove it, or use a shorter path than {}",
                short.display(),
                self.directory.display()
            ),
        ))
    }

    /// Makes sure of the same for the spare socket's directory.
    pub fn secure_spare_directory(&self) -> io::Result<()> {
        let spare = shared_directory(SPARE_SOCKETS);
        make_private_directory(&spare)?;
        match is_private(&spare)? {
            true => Ok(()),
            false => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Connects to the socket on which this user's broker listens, and returns its path too. The error is that of the
    /// socket in PATH.
    pub fn connect<T: AsFd>(
        &self,
        connect: impl Fn(&Path) -> io::Result<T>,
    ) -> io::Result<(T, &Path)> {
        self.check_owner()?;
        self.secure_socket_directory()?;
        let connect = |path| {
            let socket = connect(path)?;
            check_peer(&socket, path)?;
            Ok((socket, path))
        };
        let missing = match connect(self.socket.as_path()) {
            Err(error) if is_nobody(&error) => error,
            outcome => return outcome,
        };
        // In another user's directory, that user may listen.
        match is_private(&shared_directory(SPARE_SOCKETS)) {
            Ok(true) => connect(self.spare_socket.as_path()).map_err(|_| missing),
            _ => Err(missing),
        }
    }

    /// Opens the log for appending. Refuses a link in its place.
    pub fn open_log(&self) -> io::Result<fs::File> {
        let mut options = fs::OpenOptions::new();
        options.create(true).append(true);
        open_own(options, &self.log)
    }
}

/// Whether nobody listens: the socket or its directory is missing, or a killed broker left the socket behind.
pub fn is_nobody(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory
    )
}

fn make_private_directory(path: &Path) -> io::Result<()> {
    match private_directory_builder().create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

fn is_private(path: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    let is_ours = found.uid() == rustix::process::geteuid().as_raw();
    Ok(found.is_dir() && is_ours && found.mode() & 0o077 == 0)
}

/// Opens a file in PATH for this user only, and follows no link.
pub fn open_own(mut options: fs::OpenOptions, path: &Path) -> io::Result<fs::File> {
    use rustix::io::Errno;
    let no_links = OFlags::NOFOLLOW.bits() as i32;
    let opened = options.mode(0o600).custom_flags(no_links).open(path);
    opened.map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!(
                "{} is a symbolic link, which is not followed, since another user may have put it there; nothing \
                 was changed. Remove the link",
                path.display()
            ),
        ),
        _ => error,
    })
}

/// Returns the directory of a relative PATH: the one that already has a broker of this user, here or further up;
/// otherwise the top of the project. So parts of a project with their own marks share the broker that was there first.
fn base_directory<'a>(from: &'a Path, path: &Path, home: Option<&Path>) -> &'a Path {
    from.ancestors()
        // A broker once started in the home directory is not for every project below it.
        .take_while(|directory| *directory == from || Some(*directory) != home)
        .find(|directory| is_place_of_ours(&directory.join(path)))
        .unwrap_or_else(|| project_directory(from))
}

/// Whether a broker of this user has been here. Others may create directories further up, such as in /tmp.
fn is_place_of_ours(directory: &Path) -> bool {
    let is_ours =
        |found: fs::Metadata| found.is_dir() && found.uid() == rustix::process::geteuid().as_raw();
    fs::metadata(directory).is_ok_and(is_ours) && directory.join("lock").is_file()
}

fn project_directory(from: &Path) -> &Path {
    from.ancestors()
        .find(|directory| {
            PROJECT_MARKS
                .iter()
                .any(|mark| directory.join(mark).exists())
        })
        .unwrap_or(from)
}

/// Resolves like `fs::canonicalize`, for a path whose last parts need not exist yet.
fn without_links(path: &Path) -> io::Result<PathBuf> {
    match (fs::canonicalize(path), path.parent(), path.file_name()) {
        (Err(error), Some(parent), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
            Ok(without_links(parent)?.join(OsStr::new(name)))
        }
        (outcome, ..) => outcome,
    }
}

/// Returns this user's own directory inside a directory that all users share.
fn shared_directory(place: &str) -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    Path::new(place).join(format!("penstock-{user}"))
}

fn private_directory_builder() -> fs::DirBuilder {
    let mut builder = fs::DirBuilder::new();
    builder.mode(0o700);
    builder
}

/// Hashes by 64-bit FNV-1a: the name must be the same in every program and version, forever.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_path_lies_beside_the_mark_of_the_project_that_is_nearest() {
        let top = tempfile::tempdir().unwrap();
        let inner = top.path().join("project/package/module");
        fs::create_dir_all(&inner).unwrap();
        assert_eq!(project_directory(&inner), inner);
        for mark in PROJECT_MARKS {
            let mark = top.path().join("project").join(mark);
            fs::write(&mark, "").unwrap();
            assert_eq!(project_directory(&inner), top.path().join("project"));
            fs::remove_file(&mark).unwrap();
        }
    }

    #[test]
    fn a_broker_that_is_there_already_is_found_from_below_and_not_from_all_of_home() {
        let top = tempfile::tempdir().unwrap();
        let path = Path::new(".penstock");
        let inner = top.path().join("shop/web/views");
        fs::create_dir_all(&inner).unwrap();
        fs::write(top.path().join("shop/web/pyproject.toml"), "").unwrap();
        let check = |home: Option<&str>, expected: &str| {
            let home = home.map(|home| top.path().join(home));
            let found = base_directory(&inner, path, home.as_deref());
            assert_eq!(found, top.path().join(expected));
        };
        check(None, "shop/web");
        fs::create_dir(top.path().join("shop/.penstock")).unwrap();
        check(None, "shop/web");
        fs::write(top.path().join("shop/.penstock/lock"), "").unwrap();
        check(None, "shop");
        check(Some("shop"), "shop/web");
        check(Some("shop/web"), "shop/web");
        fs::create_dir(inner.join(".penstock")).unwrap();
        fs::write(inner.join(".penstock/lock"), "").unwrap();
        check(Some("shop/web/views"), "shop/web/views");
    }

    #[test]
    fn a_path_is_the_same_before_and_after_it_is_made_and_through_a_link() {
        let top = tempfile::tempdir().unwrap();
        let link = top.path().join("link");
        std::os::unix::fs::symlink(top.path(), &link).unwrap();
        let before = LocalPaths::resolve(&link.join("a/b")).unwrap();
        before.create_directory().unwrap();
        assert_eq!(
            LocalPaths::resolve(&top.path().join("a/b")).unwrap(),
            before
        );
        assert_eq!(
            fs::metadata(&before.directory).unwrap().mode() & 0o777,
            0o700
        );
        assert_eq!(
            fs::read_to_string(before.directory.join(".gitignore")).unwrap(),
            "*\n"
        );
    }

    #[test]
    fn clients_look_at_the_spare_socket_only_where_nobody_listens_and_it_is_theirs() {
        use std::os::unix::fs::PermissionsExt;
        use std::os::unix::net::{UnixListener, UnixStream};
        let top = tempfile::tempdir().unwrap();
        let mut paths = LocalPaths::new(top.path().join("data"));
        let spare = shared_directory(SPARE_SOCKETS);
        assert_eq!(paths.spare_socket.parent(), Some(spare.as_path()));
        paths.create_directory().unwrap();
        paths.secure_spare_directory().unwrap();
        let connect = |paths: &LocalPaths| {
            let found = paths.connect(|path| UnixStream::connect(path));
            found
                .map(|(_, path)| path.to_path_buf())
                .map_err(|error| error.kind())
        };
        assert_eq!(connect(&paths), Err(io::ErrorKind::NotFound));
        let _spare = UnixListener::bind(&paths.spare_socket).unwrap();
        assert_eq!(connect(&paths), Ok(paths.spare_socket.clone()));
        let home = UnixListener::bind(&paths.socket).unwrap();
        assert_eq!(connect(&paths), Ok(paths.socket.clone()));
        // Left as by a killed broker.
        drop(home);
        assert_eq!(connect(&paths), Ok(paths.spare_socket.clone()));
        fs::remove_file(&paths.spare_socket).unwrap();
        assert_eq!(connect(&paths), Err(io::ErrorKind::ConnectionRefused));

        let open = top.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(!is_private(&open).unwrap(), "strangers may listen there");
        paths.socket = top.path().join("nowhere/broker.sock");
        assert_eq!(connect(&paths), Err(io::ErrorKind::NotFound));
    }

    #[test]
    fn a_log_or_a_lock_that_is_a_link_is_not_followed() {
        let top = tempfile::tempdir().unwrap();
        let precious = top.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        let paths = LocalPaths::new(top.path().join("data"));
        paths.create_directory().unwrap();
        for link in [&paths.log, &paths.lock] {
            std::os::unix::fs::symlink(&precious, link).unwrap();
        }
        let refused = |error: io::Error| {
            assert!(error.to_string().contains("Remove the link"), "{error}");
        };
        let lock = || {
            let mut options = fs::OpenOptions::new();
            options.create(true).truncate(false).write(true);
            open_own(options, &paths.lock)
        };
        refused(paths.open_log().unwrap_err());
        refused(lock().unwrap_err());
        assert_eq!(fs::read_to_string(precious).unwrap(), "precious");

        for link in [&paths.log, &paths.lock] {
            fs::remove_file(link).unwrap();
        }
        paths.open_log().unwrap();
        lock().unwrap();
    }

    #[test]
    fn a_socket_path_always_fits_and_differs_by_directory() {
        let long = |end: &str| LocalPaths::new(PathBuf::from(format!("/{}{end}", "x".repeat(200))));
        assert!(long("a").socket.as_os_str().len() <= LONGEST_SOCKET_PATH);
        assert_ne!(long("a").socket, long("b").socket);
        let short = LocalPaths::new(PathBuf::from("/data"));
        assert_eq!(short.socket, Path::new("/data/broker.sock"));
        let brim = "/".to_owned() + &"x".repeat(LONGEST_SOCKET_PATH - "//broker.sock".len());
        assert!(
            LocalPaths::new(PathBuf::from(&brim))
                .socket
                .starts_with(&brim)
        );
        assert!(
            !LocalPaths::new(PathBuf::from(brim.clone() + "x"))
                .socket
                .starts_with(&brim)
        );
    }
}
