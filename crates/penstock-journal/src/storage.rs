//! Interface to a disk, and the disk of this machine.
//!
//! The traits are small so that a test's disk can be exact about what survives a power cut
//! ([`crate::sim::SimStorage`]). Names are plain file names inside one directory.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};

/// Directory of files. Clones refer to the same directory: the writer's thread and the one that prepares spares each
/// hold one.
pub trait Storage: Clone + Send + 'static {
    type File: StoredFile;
    /// Held as long as this process owns the directory.
    type Lock: Send + 'static;

    /// Returns the directory's name for people.
    fn location(&self) -> String;
    /// Locks the directory; `None`: another process holds it.
    fn lock(&self) -> io::Result<Option<Self::Lock>>;
    fn list(&self) -> io::Result<Vec<String>>;
    /// Creates a new, empty file; fails when the name is taken.
    fn create(&self, name: &str) -> io::Result<Self::File>;
    fn open(&self, name: &str) -> io::Result<Self::File>;
    /// Renames a file, and replaces `target` if there is one.
    fn rename(&self, source: &str, target: &str) -> io::Result<()>;
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renames and removals durable. Until this returns, a power cut may undo them.
    fn sync_directory(&self) -> io::Result<()>;
    /// Returns how much could be written, if the file system knows.
    fn free_bytes(&self) -> Option<u64> {
        None
    }
}

/// An open file.
pub trait StoredFile: Send + 'static {
    /// Its length in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Reads until `buffer` is full or the file ends; returns the number of bytes read.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize>;
    /// Writes all pieces one after another. After an error any part of them may be written.
    fn write_at(&self, offset: u64, pieces: &[&[u8]]) -> io::Result<()>;
    /// Makes written bytes and the file's length durable. Until this returns, a power cut may undo them. After an
    /// error, earlier writes may be lost as well.
    fn sync(&self) -> io::Result<()>;
}

/// A directory on a local disk of this machine.
#[derive(Clone, Debug)]
pub struct DiskStorage {
    path: Arc<PathBuf>,
    directory: Arc<File>,
}

impl DiskStorage {
    /// Opens the directory at `path`, and creates it (for this user only) if there is none. Fails with `Unsupported` on
    /// a network file system, whose locks and syncs can't be relied on.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        make_directory(&path)?;
        let storage = Self::open_existing(path)?;
        overwrite_in_place(&storage.directory);
        Ok(storage)
    }

    /// Opens like [`Self::open`], but fails with `NotFound` when there is no such directory.
    pub fn open_existing(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let directory = File::open(&path)?;
        if !directory.metadata()?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        if let Some(kind) = network_file_system(&directory)? {
            let text = format!(
                "{} is on a network file system ({kind}); choose a directory on a local disk",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(Self {
            path: Arc::new(path),
            directory: Arc::new(directory),
        })
    }

    /// Returns the size of its file system.
    pub fn disk_bytes(&self) -> io::Result<u64> {
        let system = rustix::fs::fstatvfs(&*self.directory)?;
        Ok(system.f_blocks.saturating_mul(system.f_frsize))
    }

    /// Whether a written block can be overwritten on a full disk.
    pub fn overwrites_in_place(&self) -> io::Result<bool> {
        writes_blocks_twice(&self.directory)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Makes `path` and its parents, and syncs each directory that got a new entry.
fn make_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    make_directory(parent)?;
    match DirBuilder::new().mode(0o700).create(path) {
        // Another process was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        result => result?,
    }
    sync_directory(&File::open(parent)?)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn network_file_system(directory: &File) -> io::Result<Option<&'static str>> {
    let kind = rustix::fs::fstatfs(directory)?.f_type as u64 as u32;
    Ok(match kind {
        0x0000_6969 => Some("NFS"),
        0x0000_517b | 0xff53_4d42 | 0xfe53_4d42 => Some("SMB"),
        0x5346_414f => Some("AFS"),
        0x00c3_6400 => Some("Ceph"),
        _ => None,
    })
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const BTRFS: u32 = 0x9123_683e;

#[cfg(any(target_os = "linux", target_os = "android"))]
fn writes_blocks_twice(directory: &File) -> io::Result<bool> {
    const ZFS: u32 = 0x2fc1_2fc1;
    const BCACHEFS: u32 = 0xca45_1a4e;
    const F2FS: u32 = 0xf2f5_2010;
    const NILFS: u32 = 0x0000_3434;
    let kind = rustix::fs::fstatfs(directory)?.f_type as u64 as u32;
    Ok(![BTRFS, ZFS, BCACHEFS, F2FS, NILFS].contains(&kind))
}

/// Returns false: APFS copies blocks of cloned files only.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn writes_blocks_twice(_: &File) -> io::Result<bool> {
    Ok(true)
}

/// Asks Btrfs not to copy the blocks of files created here from now on. An overwritten segment would otherwise occupy
/// up to twice its size: its old extent and the new ones. This turns off Btrfs's checksums; the journal has its own.
/// Failure is harmless, so errors are ignored.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn overwrite_in_place(directory: &File) {
    use rustix::fs::{IFlags, fstatfs, ioctl_getflags, ioctl_setflags};
    if fstatfs(directory).is_ok_and(|found| found.f_type as u64 as u32 == BTRFS)
        && let Ok(flags) = ioctl_getflags(directory)
        && !flags.contains(IFlags::NOCOW)
    {
        let _best_effort = ioctl_setflags(directory, flags | IFlags::NOCOW);
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn overwrite_in_place(_: &File) {}

#[cfg(target_vendor = "apple")]
fn network_file_system(directory: &File) -> io::Result<Option<&'static str>> {
    const MNT_LOCAL: u32 = 0x1000;
    let flags = rustix::fs::fstatfs(directory)?.f_flags;
    Ok((flags & MNT_LOCAL == 0).then_some("not MNT_LOCAL"))
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn network_file_system(_: &File) -> io::Result<Option<&'static str>> {
    Ok(None)
}

#[cfg(not(target_vendor = "apple"))]
use rustix::fs::{fdatasync as sync_data, fsync as sync_all};
// On macOS fsync leaves data in the drive's cache; only F_FULLFSYNC does not.
#[cfg(target_vendor = "apple")]
use rustix::fs::{fcntl_fullfsync as sync_all, fcntl_fullfsync as sync_data};

fn uninterrupted(call: impl Fn() -> rustix::io::Result<()>) -> io::Result<()> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            result => return Ok(result?),
        }
    }
}

fn sync_directory(directory: &File) -> io::Result<()> {
    // Not fdatasync: on ext4 that does not wait for a directory's entries.
    uninterrupted(|| sync_all(directory))
}

impl Storage for DiskStorage {
    type File = File;
    type Lock = File;

    fn location(&self) -> String {
        self.path.display().to_string()
    }

    /// Locks the directory itself. So no lock file has to be created in a read-only directory, and none is left behind.
    /// The kernel releases the lock when the process exits, however it exits.
    fn lock(&self) -> io::Result<Option<File>> {
        let directory = File::open(&*self.path)?;
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(directory)),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&*self.path)? {
            // The journal's own names are ASCII; any other name is not the journal's.
            names.extend(entry?.file_name().into_string());
        }
        Ok(names)
    }

    fn create(&self, name: &str) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        options.open(self.file(name))
    }

    fn open(&self, name: &str) -> io::Result<File> {
        let kind = std::fs::metadata(self.file(name))?.file_type();
        if !kind.is_file() {
            let what = match kind.is_dir() {
                true => "a directory",
                false => "no ordinary file",
            };
            let text = format!(
                "{name} is {what}, which Penstock did not create: move it out of {}",
                self.path.display()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        match OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.file(name))
        {
            // fsck may read files that it must not change.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                ) =>
            {
                File::open(self.file(name))
            }
            result => result,
        }
    }

    fn rename(&self, source: &str, target: &str) -> io::Result<()> {
        std::fs::rename(self.file(source), self.file(target))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        std::fs::remove_file(self.file(name))
    }

    fn sync_directory(&self) -> io::Result<()> {
        sync_directory(&self.directory)
    }

    fn free_bytes(&self) -> Option<u64> {
        let system = rustix::fs::fstatvfs(&*self.directory).ok()?;
        Some(system.f_bavail.saturating_mul(system.f_frsize))
    }
}

impl StoredFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while read < buffer.len() {
            match FileExt::read_at(self, &mut buffer[read..], offset + read as u64) {
                Ok(0) => break,
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    fn write_at(&self, mut offset: u64, pieces: &[&[u8]]) -> io::Result<()> {
        let mut slices: Vec<IoSlice> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut rest = &mut slices[..];
        IoSlice::advance_slices(&mut rest, 0);
        while !rest.is_empty() {
            match rustix::io::pwritev(self, rest, offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    offset += bytes as u64;
                    IoSlice::advance_slices(&mut rest, bytes);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        uninterrupted(|| sync_data(self))
    }
}
