//! Lock that makes a process the broker of a directory.

use std::os::unix::fs::MetadataExt;
use std::{fs, io};

use penstock_directory::{LocalPaths, open_own};
use penstock_journal::is_full;

/// Lock that makes this process the broker of a directory. The kernel releases it when the process exits, however it
/// exits.
#[derive(Debug)]
pub struct DirectoryLock {
    paths: LocalPaths,
    lock: fs::File,
}

impl DirectoryLock {
    /// Takes the lock, and creates the directory if there is none. `None`: another process is its broker.
    pub fn take(paths: LocalPaths) -> io::Result<Option<Self>> {
        // Checked before anything is created, and again for files that another process has created in between.
        paths.check_owner()?;
        paths.create_directory()?;
        paths.check_owner()?;
        match paths.secure_socket_directory() {
            // The spare socket is used instead.
            Err(error) if is_full(&error) => {}
            outcome => outcome?,
        }
        let mut options = fs::OpenOptions::new();
        options.create(true).truncate(false).write(true);
        let lock = open_own(options, &paths.lock)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        let guard = Self { paths, lock };
        // Between opening and locking, somebody may have deleted the directory and created it again.
        Ok(guard.directory_is_ours().then_some(guard))
    }

    pub fn paths(&self) -> &LocalPaths {
        &self.paths
    }

    /// Whether the directory is still the one that was locked: somebody may delete it, and another broker may begin in
    /// a new one of the same name.
    pub fn directory_is_ours(&self) -> bool {
        let identity = |found: fs::Metadata| (found.dev(), found.ino());
        match (fs::metadata(&self.paths.lock), self.lock.metadata()) {
            (Ok(there), Ok(ours)) => identity(there) == identity(ours),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_that_others_can_write_is_refused_wherever_it_is() {
        use std::os::unix::fs::PermissionsExt;
        let top = tempfile::tempdir().unwrap();
        let paths = LocalPaths::resolve(&top.path().join("data")).unwrap();
        paths.create_directory().unwrap();
        let elsewhere = top.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &paths.journal).unwrap();
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = DirectoryLock::take(paths.clone()).unwrap_err().to_string();
        assert!(refused.contains(elsewhere.to_str().unwrap()), "{refused}");
        fs::set_permissions(&elsewhere, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(DirectoryLock::take(paths).unwrap().is_some());
    }
}
