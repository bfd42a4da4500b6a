//! Simulated disk that forgets: a power cut as a struct.
//!
//! Each file has its *durable* bytes, the writes since (*pending*), and the bytes that a reader sees (*cached*). A crash
//! keeps, for each sector of each file separately, a random one of the versions since the last sync. The same holds for
//! the file's length and for each entry of the directory. Nothing here is likelier than on a real disk; it only happens
//! sooner.

mod leftovers;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::storage::{Storage, StoredFile};

/// Unit that a disk writes whole or not at all.
pub const SECTOR: u64 = 512;

/// Small deterministic source of randomness (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0);
        self.draw() % limit
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn bool(&mut self) -> bool {
        self.draw() & 1 == 1
    }
}

/// Faults to inject, and when. Calls that change anything are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Fails the call with EIO, possibly after doing part of it. After a failed sync the pages count as clean: a later
    /// sync succeeds and writes none of them.
    Error,
    /// Fails the call with ENOSPC, if it writes.
    DiskFull,
    /// Cuts the power during the call: it and all later ones fail, until [`SimStorage::crash`] shows what was kept.
    PowerOff,
    /// Kills the process during the call: it never learns whether the call was done, and makes no later ones.
    Killed,
}

/// Directory on a simulated disk. Clones are the same directory.
#[derive(Clone)]
pub struct SimStorage {
    disk: Arc<Mutex<Disk>>,
    /// Process that this handle belongs to; handles do not outlive their process.
    process: u64,
}

#[derive(Clone, Default)]
struct Disk {
    files: Vec<Inode>,
    /// Free indices in `files`, to be reused: a run may drop many thousands of segments.
    unused: BTreeSet<usize>,
    /// Entries as a process sees them, and as they would be found after a power cut.
    directory: BTreeMap<String, usize>,
    durable_directory: BTreeMap<String, usize>,
    pending_entries: Vec<EntryChange>,
    calls: u64,
    faults: BTreeMap<u64, Fault>,
    power_is_off: bool,
    /// Limit of the total size of all files.
    quota_bytes: Option<u64>,
    process: u64,
    locked: bool,
    rng: Option<Rng>,
}

#[derive(Clone, Default)]
struct Inode {
    cached: Vec<u8>,
    durable: Vec<u8>,
    /// Writes since the last sync, in order.
    pending: Vec<Write>,
    /// Number of open handles.
    handles: usize,
}

#[derive(Clone)]
struct Write {
    offset: u64,
    bytes: Vec<u8>,
}

impl Write {
    fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }

    fn sectors(&self) -> std::ops::Range<u64> {
        self.offset / SECTOR..self.end().div_ceil(SECTOR)
    }
}

#[derive(Clone)]
enum EntryChange {
    Create(String, usize),
    Rename {
        source: String,
        target: String,
        file: usize,
    },
    Remove(String, usize),
}

impl Default for SimStorage {
    fn default() -> Self {
        Self::new()
    }
}

impl SimStorage {
    pub fn new() -> Self {
        Self {
            disk: Arc::default(),
            process: 0,
        }
    }

    /// Plans a fault for the n-th call that changes anything, counted from the start.
    pub fn fail_at(&self, call: u64, fault: Fault) {
        self.disk().faults.insert(call, fault);
    }

    /// Returns the number of calls that changed anything.
    pub fn calls(&self) -> u64 {
        self.disk().calls
    }

    /// Limits the total size of all files from now on. A write that would make a file longer then fails; existing bytes
    /// can still be overwritten. `None`: there is no limit.
    pub fn set_quota(&self, bytes: Option<u64>) {
        self.disk().quota_bytes = bytes;
    }

    /// Returns the total size of all files.
    pub fn used_bytes(&self) -> u64 {
        self.disk().used_bytes()
    }

    /// Cancels the planned faults.
    pub fn forget_faults(&self) {
        self.disk().faults.clear();
    }

    /// Whether the process that this handle belongs to was killed.
    pub fn is_dead(&self) -> bool {
        self.disk().process != self.process
    }

    /// Whether the power was cut during a call, and [`Self::crash`] was not called yet.
    pub fn is_off(&self) -> bool {
        self.disk().power_is_off
    }

    /// Seeds the remains of failed calls; by default they leave nothing.
    pub fn seed_faults(&self, rng: Rng) {
        self.disk().rng = Some(rng);
    }

    /// Kills the process: its writes remain, and all its handles are dead.
    pub fn kill(&self) -> Self {
        let mut disk = self.disk();
        disk.end_process();
        Self {
            disk: self.disk.clone(),
            process: disk.process,
        }
    }

    /// Cuts the power and restores it: a random part of the unsynced changes is lost.
    pub fn crash(&self, rng: &mut Rng) -> Self {
        self.disk().crash(rng);
        self.kill()
    }

    /// Copies the disk in its present state.
    pub fn fork(&self) -> Self {
        let copy = self.disk().clone();
        Self {
            disk: Arc::new(Mutex::new(copy)),
            process: self.process,
        }
    }

    /// Returns a file's bytes as a reader sees them.
    pub fn contents(&self, name: &str) -> Option<Vec<u8>> {
        let disk = self.disk();
        Some(disk.files[*disk.directory.get(name)?].cached.clone())
    }

    /// Simulates rot: replaces a file's bytes, on the disk and in memory.
    pub fn corrupt(&self, name: &str, bytes: Vec<u8>) {
        let mut disk = self.disk();
        let file = disk.directory[name];
        disk.files[file] = Inode {
            durable: bytes.clone(),
            cached: bytes,
            pending: Vec::new(),
            handles: disk.files[file].handles,
        };
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk
            .lock()
            .expect("a simulated disk is used by one test")
    }

    /// Begins a call: fails when this handle's process is dead.
    fn live(&self) -> io::Result<MutexGuard<'_, Disk>> {
        let disk = self.disk();
        if disk.power_is_off || disk.process != self.process {
            return Err(io::Error::other("the power is off"));
        }
        Ok(disk)
    }
}

impl Disk {
    /// Counts a call and returns the fault planned for it, if any.
    fn change(&mut self) -> Option<Fault> {
        let fault = self.faults.remove(&self.calls);
        self.calls += 1;
        self.power_is_off |= fault == Some(Fault::PowerOff);
        if fault == Some(Fault::Killed) {
            self.end_process();
        }
        fault
    }

    /// Returns the result of a call that met `fault`.
    fn outcome(fault: Option<Fault>) -> io::Result<()> {
        match fault {
            None => Ok(()),
            Some(Fault::DiskFull) => Err(io::ErrorKind::StorageFull.into()),
            Some(Fault::Error | Fault::PowerOff | Fault::Killed) => {
                Err(io::Error::other("the disk failed"))
            }
        }
    }

    fn used_bytes(&self) -> u64 {
        let lengths = self.directory.values();
        lengths
            .map(|file| self.files[*file].cached.len() as u64)
            .sum()
    }

    /// Returns the bytes of a write up to `end` for which there is no space.
    fn lacking(&self, file: usize, end: u64) -> u64 {
        let grows = end.saturating_sub(self.files[file].cached.len() as u64);
        match self.quota_bytes {
            Some(quota) if grows > 0 => {
                grows.min((self.used_bytes() + grows).saturating_sub(quota))
            }
            _ => 0,
        }
    }

    fn lookup(&self, name: &str) -> io::Result<usize> {
        self.directory
            .get(name)
            .copied()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn crash(&mut self, rng: &mut Rng) {
        for file in &mut self.files {
            file.crash(rng);
        }
        for change in std::mem::take(&mut self.pending_entries) {
            if rng.bool() {
                change.apply(&mut self.durable_directory);
            }
        }
        self.come_back();
    }

    /// Restores the power.
    fn come_back(&mut self) {
        self.directory = self.durable_directory.clone();
        self.power_is_off = false;
        self.faults.clear();
    }

    /// Ends a process: its handles are dead, and with them files without a name.
    fn end_process(&mut self) {
        self.process += 1;
        self.locked = false;
        for file in &mut self.files {
            file.handles = 0;
        }
        self.forget_nameless();
    }

    /// Removes files that have no name and no open handle.
    fn forget_nameless(&mut self) {
        let named = self
            .directory
            .values()
            .chain(self.durable_directory.values());
        let changed = self.pending_entries.iter().map(EntryChange::file);
        let kept: BTreeSet<usize> = named.copied().chain(changed).collect();
        for (number, file) in self.files.iter_mut().enumerate() {
            if file.handles == 0 && !kept.contains(&number) && self.unused.insert(number) {
                *file = Inode::default();
            }
        }
    }
}

impl Inode {
    fn write(&mut self, write: Write) {
        put(&mut self.cached, write.offset, &write.bytes);
        self.pending.push(write);
    }

    fn sync(&mut self) {
        for write in std::mem::take(&mut self.pending) {
            put(&mut self.durable, write.offset, &write.bytes);
        }
    }

    fn crash(&mut self, rng: &mut Rng) {
        self.settle(rng);
        self.cached.clone_from(&self.durable);
    }

    /// Behaves like a file system after a failed sync: the pages count as clean. A reader still sees the writes, or
    /// sees the disk's content.
    fn fail_sync(&mut self, rng: &mut Rng) {
        self.settle(rng);
        if rng.bool() {
            self.cached.clone_from(&self.durable);
        }
    }

    /// Makes a random part of the pending writes durable: each sector gets one of its versions, and the file one of its
    /// lengths.
    fn settle(&mut self, rng: &mut Rng) {
        let pending = std::mem::take(&mut self.pending);
        if pending.is_empty() {
            return;
        }
        // Often nearly everything or nearly nothing gets through; otherwise any mixture.
        let mixture = rng.below(4);
        let writes = pending.len() as u64;
        let version = |rng: &mut Rng| match mixture {
            0 if !rng.one_in(8) => 0,
            1 if !rng.one_in(8) => writes,
            _ => rng.below(writes + 1),
        };
        let mut lengths = vec![self.durable.len() as u64];
        // Number of the writes that each sector has seen.
        let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
        for (index, write) in (0..).zip(&pending) {
            lengths.push(write.end().max(lengths[lengths.len() - 1]));
            for sector in write.sectors() {
                if index < *seen.entry(sector).or_insert_with(|| version(rng)) {
                    let start = (sector * SECTOR).max(write.offset);
                    let end = ((sector + 1) * SECTOR).min(write.end());
                    let piece = (start - write.offset) as usize..(end - write.offset) as usize;
                    put(&mut self.durable, start, &write.bytes[piece]);
                }
            }
        }
        let length = lengths[rng.below(lengths.len() as u64) as usize];
        self.durable.resize(length as usize, 0);
    }
}

fn put(target: &mut Vec<u8>, offset: u64, bytes: &[u8]) {
    let (start, end) = (offset as usize, offset as usize + bytes.len());
    if target.len() < end {
        target.resize(end, 0);
    }
    target[start..end].copy_from_slice(bytes);
}

impl EntryChange {
    fn file(&self) -> usize {
        match self {
            Self::Create(_, file) | Self::Remove(_, file) | Self::Rename { file, .. } => *file,
        }
    }

    /// Applies a change as far as possible: an earlier change that it builds on may be lost.
    fn apply(self, directory: &mut BTreeMap<String, usize>) {
        match self {
            Self::Create(name, file) => {
                directory.insert(name, file);
            }
            Self::Remove(name, file) => {
                if directory.get(&name) == Some(&file) {
                    directory.remove(&name);
                }
            }
            Self::Rename {
                source,
                target,
                file,
            } => {
                if directory.get(&source) == Some(&file) {
                    directory.remove(&source);
                }
                directory.insert(target, file);
            }
        }
    }
}

/// File of a [`SimStorage`].
pub struct SimFile {
    storage: SimStorage,
    file: usize,
}

impl Drop for SimFile {
    fn drop(&mut self) {
        // A dead process no longer holds any lock.
        if let Ok(mut disk) = self.storage.live() {
            let file = &mut disk.files[self.file];
            file.handles = file.handles.saturating_sub(1);
        }
    }
}

/// Lock that is released when dropped, or when its process dies.
pub struct SimLock(SimStorage);

impl Drop for SimLock {
    fn drop(&mut self) {
        if let Ok(mut disk) = self.0.live() {
            disk.locked = false;
        }
    }
}

impl Storage for SimStorage {
    type File = SimFile;
    type Lock = SimLock;

    fn location(&self) -> String {
        "(simulated)".to_string()
    }

    fn lock(&self) -> io::Result<Option<SimLock>> {
        let was_locked = std::mem::replace(&mut self.live()?.locked, true);
        Ok((!was_locked).then(|| SimLock(self.clone())))
    }

    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.live()?.directory.keys().cloned().collect())
    }

    fn create(&self, name: &str) -> io::Result<SimFile> {
        let mut disk = self.live()?;
        if disk.directory.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let fault = disk.change();
        let file = disk.unused.first().copied().unwrap_or(disk.files.len());
        if matches!(fault, None | Some(Fault::PowerOff | Fault::Killed)) {
            if !disk.unused.remove(&file) {
                disk.files.push(Inode::default());
            }
            disk.directory.insert(name.to_string(), file);
            disk.pending_entries
                .push(EntryChange::Create(name.to_string(), file));
        }
        Disk::outcome(fault)?;
        disk.files[file].handles += 1;
        Ok(SimFile {
            storage: self.clone(),
            file,
        })
    }

    fn open(&self, name: &str) -> io::Result<SimFile> {
        let mut disk = self.live()?;
        let file = disk.lookup(name)?;
        disk.files[file].handles += 1;
        Ok(SimFile {
            storage: self.clone(),
            file,
        })
    }

    fn rename(&self, source: &str, target: &str) -> io::Result<()> {
        let mut disk = self.live()?;
        let file = disk.lookup(source)?;
        let fault = disk.change();
        if matches!(fault, None | Some(Fault::PowerOff | Fault::Killed)) {
            let (source, target) = (source.to_string(), target.to_string());
            disk.directory.remove(&source);
            disk.directory.insert(target.clone(), file);
            disk.pending_entries.push(EntryChange::Rename {
                source,
                target,
                file,
            });
        }
        Disk::outcome(fault)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = self.live()?;
        let file = disk.lookup(name)?;
        let fault = disk.change();
        if matches!(fault, None | Some(Fault::PowerOff | Fault::Killed)) {
            disk.directory.remove(name);
            disk.pending_entries
                .push(EntryChange::Remove(name.to_string(), file));
        }
        Disk::outcome(fault)
    }

    fn free_bytes(&self) -> Option<u64> {
        let disk = self.disk();
        let quota = disk.quota_bytes?;
        Some(quota.saturating_sub(disk.used_bytes()))
    }

    fn sync_directory(&self) -> io::Result<()> {
        let mut disk = self.live()?;
        let fault = disk.change();
        if fault.is_none() && !disk.pending_entries.is_empty() {
            disk.pending_entries.clear();
            disk.durable_directory = disk.directory.clone();
            disk.forget_nameless();
        }
        Disk::outcome(fault)
    }
}

impl StoredFile for SimFile {
    fn size(&self) -> io::Result<u64> {
        let disk = self.storage.live()?;
        Ok(disk.files[self.file].cached.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let disk = self.storage.live()?;
        let rest = disk.files[self.file]
            .cached
            .get(offset as usize..)
            .unwrap_or_default();
        let bytes = rest.len().min(buffer.len());
        buffer[..bytes].copy_from_slice(&rest[..bytes]);
        Ok(bytes)
    }

    fn write_at(&self, offset: u64, pieces: &[&[u8]]) -> io::Result<()> {
        let mut disk = self.storage.live()?;
        let mut fault = disk.change();
        let mut bytes = pieces.concat();
        if fault.is_none() && disk.lacking(self.file, offset + bytes.len() as u64) > 0 {
            fault = Some(Fault::DiskFull);
        }
        if matches!(fault, Some(Fault::Error | Fault::DiskFull)) {
            // The call failed half-way.
            let lacking = disk.lacking(self.file, offset + bytes.len() as u64);
            let length = (bytes.len() as u64).saturating_sub(lacking);
            let kept = disk.rng.as_mut().map_or(0, |rng| rng.below(length + 1));
            bytes.truncate(kept as usize);
        }
        if !bytes.is_empty() {
            disk.files[self.file].write(Write { offset, bytes });
        }
        Disk::outcome(fault)
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.storage.live()?;
        let fault = disk.change();
        match fault {
            None => disk.files[self.file].sync(),
            Some(Fault::Error) => {
                let mut rng = disk.rng.take().unwrap_or(Rng::new(0));
                disk.files[self.file].fail_sync(&mut rng);
                disk.rng = Some(rng);
            }
            Some(Fault::DiskFull | Fault::PowerOff | Fault::Killed) => {}
        }
        Disk::outcome(fault)
    }
}
