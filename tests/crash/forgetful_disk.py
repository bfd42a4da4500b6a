"""File system that loses unsynced data at a power cut, and fails on command.

    forgetful_disk.py DIRECTORY SEED

Mounts itself at DIRECTORY (through /dev/fuse, so it needs the right to mount) and serves until its standard input ends.
Each line of JSON there is a command, answered by a line on standard output.

    {"do": "cut", "after": N}       the power fails at the N-th next change (write, sync, create, rename, unlink)
    {"do": "cut"}                   ... now. From then on everything fails with EIO
    {"do": "restore"}               decides what survives the cut, and serves that; reports what was forgotten
    {"do": "fail", "what": W, "at": K, "error": E, "forever": B}
                                    the K-th next W fails: sync, write, create, rename, unlink, read, open; or `short`:
                                    writes take only a part. Reported as `failed` in the next answers
    {"do": "hang"}                  each sync waits from now on; their number is `hanging` in the next answers
    {"do": "heal"}                  nothing fails or hangs any more
    {"do": "hurry"}                 syncs take as little time as they can; before, up to 10 ms by chance

Why not kill -9: data that a killed process has written is in the operating system, which goes on. A power cut loses all
unsynced data, or any part of it. These parts survive here, in pages of 4 KiB:

- synced data, always. Of later writes, any version of each page, or 512-byte sectors from any two versions; pages are
independent of each other and of the file's size
- directory entries, only once their directory was synced; of later changes, any subset
- a failed sync marks the pages clean without having written them, as Linux does (Rebello et al., "Can Applications
  Recover from fsync Failures?", 2020): they can still be read, by chance not even that, and no later sync writes them
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PAGE = 4096
SECTOR = 512
ROOT = 1
MAX_WRITE = 1 << 20
SLOWEST_SYNC_S = 0.01

IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
# The kernel caches nothing, so each read returns the current content of the disk.
NO_CACHE = (0, 0)
DIRECT_IO = 1
# Only these features are enabled: not requests of more than a page, atomic O_TRUNC, or directories without open.
BIG_WRITES, MAX_PAGES = 1 << 5, 1 << 22


class Refused(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class Node:
    number: int
    mode: int


@dataclass
class File(Node):
    """File: ``cache`` is the content for reads, ``disk`` the safe content, ``dirty`` each page's versions since
    then."""

    cache: bytearray = field(default_factory=bytearray)
    disk: bytearray = field(default_factory=bytearray)
    dirty: dict[int, list[bytes]] = field(default_factory=dict)

    def resize(self, size: int) -> None:
        del self.cache[size:]
        self.cache.extend(bytes(size - len(self.cache)))

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.cache):
            self.resize(offset + len(data))
        self.cache[offset : offset + len(data)] = data
        for page in range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1):
            self.dirty.setdefault(page, []).append(bytes(self.cache[page * PAGE : (page + 1) * PAGE]))

    def sync(self) -> None:
        del self.disk[len(self.cache) :]
        self.disk.extend(bytes(len(self.cache) - len(self.disk)))
        for page in self.dirty:
            self.disk[page * PAGE : (page + 1) * PAGE] = self.cache[page * PAGE : (page + 1) * PAGE]
        self.dirty.clear()

    def fail_to_sync(self, reverts: bool) -> None:
        if reverts:
            self.cache[:] = self.disk
        self.dirty.clear()

    def cut(self, chance: random.Random) -> int:
        """Forget unsynced data, and return the number of pages that differ from the last write."""
        forgotten = 0
        sizes = [len(self.disk), len(self.cache)]
        sizes += [size for page in self.dirty if min(sizes) <= (size := (page + 1) * PAGE) <= max(sizes)]
        left = bytearray(self.disk)
        size = chance.choice(sizes)
        del left[size:]
        left.extend(bytes(size - len(left)))
        for page, versions in self.dirty.items():
            start = page * PAGE
            if start >= size:
                forgotten += 1
                continue
            old = bytes(left[start : start + PAGE])
            new = chance.choice([old, *versions[-8:], versions[-1]])
            if chance.random() < 0.2:
                other = chance.choice([old, *versions[-8:]])
                new = torn(new, other, chance)
            left[start : start + PAGE] = new[: size - start].ljust(len(old), b"\0")
            forgotten += new != versions[-1]
        self.cache, self.disk, self.dirty = left, bytearray(left), {}
        return forgotten


def torn(one: bytes, other: bytes, chance: random.Random) -> bytes:
    one, other = one.ljust(PAGE, b"\0"), other.ljust(PAGE, b"\0")
    sectors = range(0, PAGE, SECTOR)
    return b"".join(chance.choice([one, other])[at : at + SECTOR] for at in sectors)


@dataclass
class Directory(Node):
    entries: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[str, ...]] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def change(self, *change: Any) -> None:
        self.changes.append(change)
        apply(self.entries, change)

    def sync(self) -> None:
        self.synced = dict(self.entries)
        self.changes.clear()

    def cut(self, chance: random.Random) -> int:
        kept = chance.choice([0.0, 0.5, 0.5, 0.5, 1.0])
        forgotten = 0
        for change in self.changes:
            if chance.random() < kept:
                apply(self.synced, change)
            else:
                forgotten += 1
        self.entries = dict(self.synced)
        self.changes.clear()
        return forgotten


def apply(entries: dict[str, Node], change: tuple[Any, ...]) -> None:
    match change:
        case ("link", name, node):
            entries[name] = node
        case ("unlink", name):
            entries.pop(name, None)
        case ("rename", source, target) if source in entries:
            entries[target] = entries.pop(source)


@dataclass
class Fault:
    what: str
    at: int
    number: int
    forever: bool
    reverts: bool

    def comes(self) -> bool:
        self.at -= 1
        return self.at == 0 or (self.forever and self.at < 0)


class Disk:
    """Handles the requests of the kernel."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.lock = threading.Lock()
        self.flows = threading.Event()
        self.flows.set()
        self.hanging = 0
        self.slowest_sync_s = SLOWEST_SYNC_S
        self.nodes: dict[int, Node] = {}
        self.root = self.add(Directory, stat.S_IFDIR | 0o700)
        self.off = False
        self.cut_after: int | None = None
        self.fault: Fault | None = None
        self.failed = 0
        self.counts: dict[str, int] = {}
        self.requests: dict[int, Callable[[int, memoryview], bytes]] = {
            1: self.lookup, 3: self.getattr, 4: self.setattr, 9: self.mkdir, 10: self.unlink, 11: self.unlink,
            12: self.rename, 14: self.open, 15: self.read, 16: self.write, 17: self.statfs, 18: self.nothing,
            20: self.fsync, 25: self.nothing, 26: self.init, 27: self.open, 28: self.readdir, 29: self.nothing,
            30: self.fsync, 34: self.nothing, 35: self.create, 45: self.rename2,
        }  # fmt: skip

    def add(self, kind: Any, mode: int) -> Any:
        node = kind(len(self.nodes) + ROOT, mode)
        self.nodes[node.number] = node
        return node

    # Faults.

    def step(self, what: str) -> Fault | None:
        """Apply faults and power cuts; called before each operation on the disk."""
        self.counts[what] = self.counts.get(what, 0) + 1
        if what not in ("read", "open"):
            if self.cut_after is not None:
                self.cut_after -= 1
                self.off |= self.cut_after <= 0
            if self.off:
                raise Refused(errno.EIO)
        fault = self.fault
        if fault is None or (fault.what != what and not (fault.what == "short" and what == "write")):
            return None
        if not fault.comes():
            return None
        self.failed += 1
        if fault.what == "short":
            return fault
        if what != "sync":
            raise Refused(fault.number)
        return fault

    def serve(self, opcode: int, number: int, body: memoryview) -> bytes:
        if opcode in (20, 30):
            # A sync takes time, and data cut in the middle of it is neither safe nor forgotten yet.
            time.sleep(self.chance.uniform(0, self.slowest_sync_s))
            self.hanging += 1
            self.flows.wait()
            self.hanging -= 1
        with self.lock:
            request = self.requests.get(opcode)
            if request is None:
                raise Refused(errno.ENOSYS)
            if self.off and opcode != 26:
                raise Refused(errno.EIO)
            return request(number, body)

    # Requests.

    def init(self, number: int, body: memoryview) -> bytes:
        _, _, readahead, flags = struct.unpack_from("<4I", body)
        flags &= BIG_WRITES | MAX_PAGES
        return struct.pack("<4I2H2I2H8I", 7, 31, readahead, flags, 16, 12, MAX_WRITE, 1, MAX_WRITE // PAGE, 0, *[0] * 8)

    def nothing(self, number: int, body: memoryview) -> bytes:
        return b""

    def attributes(self, node: Node) -> bytes:
        size = len(node.cache) if isinstance(node, File) else 0
        blocks = -(-size // SECTOR)
        return ATTR.pack(node.number, size, blocks, 0, 0, 0, 0, 0, 0, node.mode, 1, 0, 0, 0, PAGE, 0)

    def entry(self, node: Node) -> bytes:
        return ENTRY.pack(node.number, 0, 0, 0, *NO_CACHE) + self.attributes(node)

    def directory(self, number: int) -> Directory:
        node = self.nodes[number]
        if not isinstance(node, Directory):
            raise Refused(errno.ENOTDIR)
        return node

    def file(self, number: int) -> File:
        node = self.nodes[number]
        if not isinstance(node, File):
            raise Refused(errno.EISDIR)
        return node

    def lookup(self, number: int, body: memoryview) -> bytes:
        node = self.directory(number).entries.get(text(body))
        if node is None:
            raise Refused(errno.ENOENT)
        return self.entry(node)

    def getattr(self, number: int, body: memoryview) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self.attributes(self.nodes[number])

    def setattr(self, number: int, body: memoryview) -> bytes:
        (valid,) = struct.unpack_from("<I", body)
        (size,) = struct.unpack_from("<Q", body, 16)
        if valid & 1 << 3:
            self.step("write")
            # An undone truncation would be another kind of loss, but no file of the journal is truncated.
            self.file(number).resize(size)
        return self.getattr(number, body)

    def create(self, number: int, body: memoryview) -> bytes:
        (_, mode) = struct.unpack_from("<2I", body)
        name = text(body[16:])
        self.step("create")
        node = self.add(File, stat.S_IFREG | (mode & 0o777))
        self.directory(number).change("link", name, node)
        return self.entry(node) + struct.pack("<Q2I", 0, DIRECT_IO, 0)

    def mkdir(self, number: int, body: memoryview) -> bytes:
        (mode,) = struct.unpack_from("<I", body)
        self.step("create")
        node = self.add(Directory, stat.S_IFDIR | (mode & 0o777))
        self.directory(number).change("link", text(body[8:]), node)
        return self.entry(node)

    def unlink(self, number: int, body: memoryview) -> bytes:
        directory, name = self.directory(number), text(body)
        node = directory.entries.get(name)
        if isinstance(node, Directory) and node.entries:
            raise Refused(errno.ENOTEMPTY)
        self.step("unlink")
        directory.change("unlink", name)
        return b""

    def rename(self, number: int, body: memoryview) -> bytes:
        return self.move(number, struct.unpack_from("<Q", body)[0], body[8:])

    def rename2(self, number: int, body: memoryview) -> bytes:
        return self.move(number, struct.unpack_from("<Q", body)[0], body[16:])

    def move(self, number: int, target: int, names: memoryview) -> bytes:
        source_name, target_name, _ = bytes(names).split(b"\0", 2)
        if number != target:
            raise Refused(errno.EXDEV)
        self.step("rename")
        self.directory(number).change("rename", source_name.decode(), target_name.decode())
        return b""

    def open(self, number: int, body: memoryview) -> bytes:
        self.step("open")
        return struct.pack("<Q2I", 0, DIRECT_IO if isinstance(self.nodes[number], File) else 0, 0)

    def read(self, number: int, body: memoryview) -> bytes:
        self.step("read")
        _, offset, size = struct.unpack_from("<2QI", body)
        return bytes(self.file(number).cache[offset : offset + size])

    def write(self, number: int, body: memoryview) -> bytes:
        fault = self.step("write")
        _, offset, size = struct.unpack_from("<2QI", body)
        if fault is not None:
            size = self.chance.randrange(1, size) if size > 1 else size
        self.file(number).write(offset, bytes(body[40 : 40 + size]))
        return struct.pack("<2I", size, 0)

    def fsync(self, number: int, body: memoryview) -> bytes:
        fault = self.step("sync")
        node = self.nodes[number]
        assert isinstance(node, File | Directory)
        if fault is None:
            node.sync()
            return b""
        # An interrupted request has done nothing, and may be repeated.
        if isinstance(node, File) and fault.number != errno.EINTR:
            node.fail_to_sync(fault.reverts)
        raise Refused(fault.number)

    def statfs(self, number: int, body: memoryview) -> bytes:
        return struct.pack("<5Q4I6I", 1 << 24, 1 << 23, 1 << 23, 1 << 20, 1 << 19, PAGE, 255, PAGE, 0, *[0] * 6)

    def readdir(self, number: int, body: memoryview) -> bytes:
        _, offset, size = struct.unpack_from("<2QI", body)
        found = b""
        for index, (name, node) in enumerate(list(self.directory(number).entries.items())):
            encoded = name.encode()
            entry = struct.pack("<2Q2I", node.number, index + 1, len(encoded), node.mode >> 12) + encoded
            entry += bytes(-len(entry) % 8)
            if index >= offset and len(found) + len(entry) <= size:
                found += entry
        return found

    # Commands.

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            forgotten = 0
            match command["do"]:
                case "cut":
                    self.cut_after = command.get("after")
                    self.off |= self.cut_after is None
                case "restore":
                    self.off, self.cut_after = False, None
                    forgotten = sum(node.cut(self.chance) for node in list(self.nodes.values()))
                case "fail":
                    number = getattr(errno, command.get("error", "EIO"))
                    reverts = self.chance.random() < 0.3
                    self.fault = Fault(command["what"], command["at"], number, command.get("forever", False), reverts)
                    self.failed = 0
                case "hang":
                    self.flows.clear()
                case "heal":
                    self.fault = None
                    self.flows.set()
                case "hurry":
                    self.slowest_sync_s = 0
            told = {"failed": self.failed, "hanging": self.hanging, "off": self.off, "counts": self.counts}
            return {"forgotten": forgotten, **told}


def text(name: memoryview) -> str:
    return bytes(name).split(b"\0", 1)[0].decode()


def mount(directory: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40700,user_id={os.getuid()},group_id={os.getgid()}"
    nosuid_nodev = 2 | 4
    if libc.mount(b"forgetful", directory.encode(), b"fuse.forgetful", nosuid_nodev, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"can't mount at {directory}: {os.strerror(number)}")
    return device


def serve(disk: Disk, device: int) -> None:
    while True:
        try:
            request = os.read(device, MAX_WRITE + 64 * 1024)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return  # unmounted
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            raise
        _, opcode, unique, number, *_ = IN_HEADER.unpack_from(request)
        if opcode in (2, 36, 42):
            continue  # forget, interrupt: these need no answer
        failure, answer = 0, b""
        try:
            answer = disk.serve(opcode, number, memoryview(request)[IN_HEADER.size :])
        except Refused as refused:
            failure = -refused.number
        try:
            os.write(device, OUT_HEADER.pack(OUT_HEADER.size + len(answer), failure, unique) + answer)
        except OSError as error:
            if error.errno != errno.ENOENT:  # the caller has been killed
                raise


def main() -> None:
    directory, seed = sys.argv[1:]
    disk = Disk(random.Random(seed))
    device = mount(directory)
    threading.Thread(target=serve, args=(disk, device), daemon=True).start()
    try:
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            print(json.dumps(disk.obey(json.loads(line))), flush=True)
    finally:
        detach = 2
        ctypes.CDLL(None).umount2(directory.encode(), detach)


if __name__ == "__main__":
    main()
