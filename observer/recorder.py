"""The flight recorder: one memory-mapped ring file, one writer that never waits, any number of readers.

    header   4096 bytes of little-endian words, see `_Word`, and the writer's identity (msgpack)
    records  u32 length, u32 crc32 over (length, sequence, position, payload), u64 sequence from 1, u64 position,
             payload, padding to 16; a filler without sequence closes a lap

Positions are bytes that only grow; a record lies at position modulo capacity. The writer moves `tail` past what it
is about to overwrite, writes the record, then stores `head`: whatever instruction it dies at, everything between the
two is complete. Readers copy with `pread`, so that a truncated file cannot kill them, and believe a copy only when its
position and checksum are right: neither a stale lap nor a half-written record passes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
import struct
import tempfile
import threading
import time
import zlib
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from kvlens import KvlensError
from kvlens.observer.schema import Identity

MAGIC: Final = int.from_bytes(b"KVLENSFR", "little")
VERSION: Final = 1
HEADER: Final = 4096
DEFAULT_CAPACITY: Final = 32 << 20
SILENCE_SECONDS: Final = 10.0
"""Without a sign of life for that long, a writer is stalled, or dead where its process cannot be seen."""
KEPT: Final = 3
"""Files of earlier instances that stay beside a ring."""

_RECORD = struct.Struct("<IIQQ")
_COVERED = struct.Struct("<IQQ")
_ALIGN = 16
_ROTATED = re.compile(r"(.+)\.[0-9a-f]{32}\.ring")
"""Name of an earlier instance's file; what stands before its instance is the stem of the ring it was."""


class RingError(KvlensError):
    """A ring file that cannot be written or read; the message says what to do."""


class RingInUse(RingError):
    """A live engine writes that file."""


class _Word(IntEnum):
    """Index of each u64 of the header."""

    MAGIC = 0
    VERSION = 1
    CAPACITY = 2
    PID = 3
    PID_STARTED = 4  # clock ticks since boot: tells a process from a later one of the same number
    PID_NAMESPACE = 5  # processes can only be looked up by who shares it
    HEAD = 6  # end of the newest complete record
    TAIL = 7  # start of the oldest record that may still be read
    HEARTBEAT_NS = 8  # wall clock, by a small thread
    WRITTEN_NS = 9  # wall clock of the newest record
    CLOSED = 10  # 1 after a clean end
    IDENTITY = 11  # length in bytes; what follows is the identity


# Reading a member of an enumeration costs more than the store it is for.
_HEAD, _WRITTEN = int(_Word.HEAD), int(_Word.WRITTEN_NS)


class Record(NamedTuple):
    """One record as read: `sequence` counts from 1 in each file."""

    sequence: int
    payload: bytes


class Stores:
    """Every store the writer makes, so that a test can look at the file after each."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._view = memoryview(memory)
        self._words = self._view[:HEADER].cast("Q")

    def word(self, index: int, value: int) -> None:
        """One aligned 8-byte store."""
        self._words[index] = value

    def data(self, offset: int, content: bytes) -> None:
        """Not atomic."""
        self._view[offset : offset + len(content)] = content

    def length_at(self, offset: int) -> int:
        """The u32 at `offset`."""
        return int.from_bytes(self._view[offset : offset + 4], "little")

    def close(self) -> None:
        self._words.release()
        self._view.release()
        self._memory.close()


class RingWriter:
    """Writes one ring file. Not thread-safe: one thread appends; the heartbeat has a thread and a word of its own."""

    def __init__(
        self,
        path: Path,
        identity: Identity,
        capacity: int = DEFAULT_CAPACITY,
        *,
        stores: type[Stores] = Stores,
        heartbeat: bool = True,
    ) -> None:
        """Creates `path`, mode 0600; a file of an earlier instance is kept beside it.

        capacity: bytes of records, rounded up to whole memory pages.
        Raises RingError when the directory is not writable, the disk is full, or somebody else writes this file.
        """
        self.path = path
        self.capacity = -(-max(capacity, mmap.PAGESIZE) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._position = 0
        self._tail = 0
        self._sequence = 0
        _set_aside(path)
        self._stores = stores(_create(path, HEADER + self.capacity, self._header(identity)))
        self._stopped = threading.Event()
        self._heart: threading.Thread | None = None
        if heartbeat:
            self._heart = threading.Thread(target=self._beat, name="ring-heartbeat", daemon=True)
            self._heart.start()

    @property
    def largest(self) -> int:
        """The longest payload that fits: a quarter of the ring, so that a reader keeps some history."""
        return self.capacity // 4 - _RECORD.size

    def append(self, payload: bytes) -> int:
        """Write one record; returns its sequence number. No lock, no system call. Raises ValueError if too long."""
        if len(payload) > self.largest:
            raise ValueError(f"a record of {len(payload):,} bytes is longer than the {self.largest:,} this ring takes")
        length, position, capacity = len(payload), self._position, self.capacity
        size = -(-(_RECORD.size + length) // _ALIGN) * _ALIGN
        left = capacity - position % capacity
        start = position if size <= left else position + left
        end = start + size
        if end - capacity > self._tail:
            self._make_room(end)
        if start != position and left >= _RECORD.size:
            self._write(position, 0, b"", left - _RECORD.size)
        sequence = self._sequence + 1
        self._write(start, sequence, payload, length)
        stores = self._stores
        stores.word(_HEAD, end)
        stores.word(_WRITTEN, time.time_ns())
        self._position, self._sequence = end, sequence
        return sequence

    def _make_room(self, end: int) -> None:
        """Move the tail past everything that a write up to `end` overwrites."""
        oldest = end - self.capacity
        tail = self._tail
        while tail < oldest:
            at = tail % self.capacity
            left = self.capacity - at
            tail += left if left < _RECORD.size else _padded(self._stores.length_at(HEADER + at))
        if tail != self._tail:
            self._tail = tail
            self._stores.word(_Word.TAIL, tail)

    def _write(self, position: int, sequence: int, payload: bytes, length: int) -> None:
        crc = zlib.crc32(payload, zlib.crc32(_COVERED.pack(length, sequence, position)))
        record = _RECORD.pack(length, crc, sequence, position) + payload
        self._stores.data(HEADER + position % self.capacity, record)

    def _header(self, identity: Identity) -> bytes:
        encoded = msgspec.msgpack.encode(identity)
        words = [0] * len(_Word)
        words[_Word.MAGIC] = MAGIC
        words[_Word.VERSION] = VERSION
        words[_Word.CAPACITY] = self.capacity
        words[_Word.PID] = os.getpid()
        words[_Word.PID_STARTED] = _process_started(os.getpid()) or 0
        words[_Word.PID_NAMESPACE] = _pid_namespace()
        words[_Word.HEARTBEAT_NS] = words[_Word.WRITTEN_NS] = time.time_ns()
        words[_Word.IDENTITY] = len(encoded)
        header = struct.pack(f"<{len(words)}Q", *words) + encoded
        if len(header) > HEADER:
            raise RingError(
                f"the identity takes {len(encoded):,} bytes: shorten the engine name {identity.name[:40]!r}"
            )
        return header

    def _beat(self) -> None:
        while not self._stopped.wait(1.0):
            self._stores.word(_Word.HEARTBEAT_NS, time.time_ns())

    def close(self) -> None:
        """A clean end: readers will not take it for a crash. May be called twice."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._heart is not None:
            self._heart.join()
        self._stores.word(_Word.CLOSED, 1)
        self._stores.close()


class RingReader:
    """Follows one ring file from the oldest record on; `lost` counts records overwritten before they were read."""

    def __init__(self, path: Path) -> None:
        """Raises RingError when there is no such file, it is no ring, or one of another version."""
        self.path = path
        self.lost = 0
        self._file = _open(path)
        try:
            words = _read_header(self._file, path)
            self._capacity, self.pid = words[_Word.CAPACITY], words[_Word.PID]
            status = os.fstat(self._file)
            self._inode, expected = status.st_ino, HEADER + self._capacity
            if status.st_size < expected:
                raise RingError(
                    f"{path} is truncated to {status.st_size:,} of {expected:,} bytes: restart its engine for a new one"
                )
            self.identity = _read_identity(self._file, path, words)
            self._position = words[_Word.TAIL]
            self._sequence: int | None = None
            if words[_Word.CLOSED] != 1:
                self._join(words[_Word.HEAD])
        except BaseException:
            os.close(self._file)
            raise

    def _join(self, head: int) -> None:
        """Learn the oldest record's number, so that what is overwritten before the first `read` counts as lost."""
        if head == 0:
            self._sequence = 0
        elif oldest := self.read(1):
            self._sequence = oldest[0].sequence - 1
            self._position -= _padded(len(oldest[0].payload))

    def __enter__(self) -> RingReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    @property
    def instance(self) -> str:
        return self.identity.instance

    # -- records ----------------------------------------------------------------------------------------------------

    def read(self, limit: int | None = None) -> list[Record]:
        """Records since the last call, oldest first, at most `limit`."""
        records: list[Record] = []
        while limit is None or len(records) < limit:
            words = self._words()
            head, tail = words[_Word.HEAD], words[_Word.TAIL]
            self._position = before = max(self._position, tail)
            if before >= head:
                break
            records += self._read_stretch(head, None if limit is None else limit - len(records))
            if self._position == before >= self._words()[_Word.TAIL]:
                self._position = head  # not overwritten meanwhile, and still wrong: the file was damaged from outside
        return records

    def _read_stretch(self, head: int, limit: int | None) -> list[Record]:
        """Whole records of one lap from one copy; stops at the first that does not check."""
        at = self._position % self._capacity
        size = min(head - self._position, self._capacity - at, max(4 << 20, self._capacity // 4))
        copy = os.pread(self._file, size, HEADER + at)
        records: list[Record] = []
        offset = 0
        while offset < len(copy) and (limit is None or len(records) < limit):
            lap_left = self._capacity - at - offset
            if lap_left < _RECORD.size:  # no room for a filler
                self._position += lap_left
                break
            checked = self._check(copy, offset)
            if checked is None:
                break
            length, record = checked
            offset += _padded(length)
            self._position += _padded(length)
            if record.sequence:
                self._count(record.sequence)
                records.append(record)
        return records

    def _check(self, copy: bytes, offset: int) -> tuple[int, Record] | None:
        """Length and record at `offset`, when position and checksum are right."""
        if offset + _RECORD.size > len(copy):
            return None
        length, crc, sequence, position = _RECORD.unpack_from(copy, offset)
        if position != self._position:
            return None
        begin = offset + _RECORD.size
        payload = copy[begin : begin + length] if sequence else b""
        if sequence and len(payload) != length:
            return None
        if crc != zlib.crc32(payload, zlib.crc32(_COVERED.pack(length, sequence, position))):
            return None
        return length, Record(sequence, payload)

    def _count(self, sequence: int) -> None:
        if self._sequence is not None:
            self.lost += sequence - self._sequence - 1
        self._sequence = sequence

    # -- the writer -------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """The writer ended cleanly."""
        return self._words()[_Word.CLOSED] == 1

    @property
    def is_replaced(self) -> bool:
        """Another file has taken this one's name: a successor started."""
        try:
            return self.path.stat().st_ino != self._inode
        except FileNotFoundError:
            return False

    @property
    def written_at(self) -> float:
        """When the newest record was written, in Unix seconds."""
        return self._words()[_Word.WRITTEN_NS] / 1e9

    def status(self) -> str:
        """up; stalled: alive without a sign of life or a frame for ten seconds; down: ended, cleanly or not."""
        return _status(self._words())

    def _words(self) -> tuple[int, ...]:
        return _read_words(self._file, self.path)


# -- headers ----------------------------------------------------------------------------------------------------------


def _open(path: Path) -> int:
    """A descriptor of the regular file `path`. Raises RingError."""
    try:
        # Without O_NONBLOCK a pipe of that name would wait for somebody to write into it.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise RingError(f"there is no ring {path}: start the engine with --ring {path}, or name another") from None
    except OSError as error:
        raise RingError(f"{path} cannot be read ({error.strerror}): run as the user of the engine") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise RingError(f"{path} is no file: give --ring the file of an engine")
    return file


def _read_header(file: int, path: Path) -> tuple[int, ...]:
    """The words of a ring of this version, whole or truncated. Raises RingError for anything else."""
    if os.pread(file, 8, 0) != MAGIC.to_bytes(8, "little"):
        raise RingError(f"{path} is no flight recorder of kvlens: give --ring another file")
    words = _read_words(file, path)
    if words[_Word.VERSION] != VERSION:
        raise RingError(
            f"{path} has format {words[_Word.VERSION]}, this kvlens reads {VERSION}: use the version that wrote it, or "
            "move the file away"
        )
    if words[_Word.CAPACITY] == 0 or words[_Word.CAPACITY] % _ALIGN:
        raise _damaged(path, f"capacity {words[_Word.CAPACITY]:,}")
    return words


def _read_identity(file: int, path: Path, words: tuple[int, ...]) -> Identity:
    try:
        encoded = os.pread(file, min(words[_Word.IDENTITY], HEADER), len(_Word) * 8)
        return msgspec.msgpack.decode(encoded, type=Identity)
    except msgspec.DecodeError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, what: str) -> RingError:
    return RingError(f"{path} has a damaged header ({what}): delete it and restart its engine")


def _read_words(file: int, path: Path) -> tuple[int, ...]:
    raw = os.pread(file, len(_Word) * 8, 0)
    if len(raw) < len(_Word) * 8:
        raise RingError(f"{path} is truncated to {len(raw)} bytes: delete it and restart its engine")
    return struct.unpack(f"<{len(_Word)}Q", raw)


def _status(words: tuple[int, ...]) -> str:
    """up, stalled or down, from a header."""
    now = time.time_ns()
    beat_age = (now - words[_Word.HEARTBEAT_NS]) / 1e9
    if words[_Word.CLOSED] == 1:
        return "down"
    if words[_Word.PID_NAMESPACE] == _pid_namespace() != 0:
        if _process_started(words[_Word.PID]) != words[_Word.PID_STARTED]:
            return "down"
    elif beat_age > SILENCE_SECONDS:
        return "down"
    frame_age = (now - words[_Word.WRITTEN_NS]) / 1e9
    return "stalled" if max(beat_age, frame_age) > SILENCE_SECONDS else "up"


# -- files ------------------------------------------------------------------------------------------------------------


def ring_directories() -> list[Path]:
    """Where rings are put, best first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = [Path("/dev/shm") / f"kvlens-{os.getuid()}"] if Path("/dev/shm").is_dir() else []
    own = [Path(runtime) / "kvlens"] if runtime else []
    return [*own, *shared, Path(tempfile.gettempdir()) / f"kvlens-{os.getuid()}"]


def ring_directory() -> Path:
    """The first directory of `ring_directories` that can be used; created, for its owner only."""
    for directory in ring_directories():
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(directory, os.W_OK):
                return directory
    raise RingError(f"none of {', '.join(map(str, ring_directories()))} is writable: give --ring FILE")


def discover(directory: Path | None = None) -> list[Path]:
    """Rings of `directory`, without those of earlier instances; default: all directories."""
    places = [directory] if directory is not None else ring_directories()
    found = [path for place in places if place.is_dir() for path in sorted(place.glob("*.ring"))]
    return [path for path in found if not _ROTATED.fullmatch(path.name)]


def open_default(name: str, identity: Identity, capacity: int = DEFAULT_CAPACITY) -> tuple[RingWriter, list[str]]:
    """A ring in the best directory that has room for it, and why better ones were passed over. Raises RingError."""
    passed: list[str] = []
    file = re.sub(r"[^A-Za-z0-9._-]+", "_", name) + ".ring"
    for directory in ring_directories():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return RingWriter(directory / file, identity, capacity), passed
        except RingInUse:
            raise  # another directory would only hide one engine behind the other
        except (OSError, RingError) as error:
            passed.append(str(error))
    raise RingError(f"no place for a flight recorder: {'; '.join(passed)}: give --ring FILE, or --unobserved")


def _create(path: Path, size: int, header: bytes) -> mmap.mmap:
    """A file of `size` bytes that really exist, under its name only once it has a header."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RingError(f"{path} cannot be written ({error.strerror}): choose another with --ring FILE") from None
    try:
        # Allocated now: a full disk is a message here, and not a SIGBUS in the middle of a step.
        os.posix_fallocate(file, 0, size)
        os.pwrite(file, header, 0)
        # Mapped now as well: a page fault in the middle of a step costs more than the frame.
        memory = mmap.mmap(file, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        fresh.rename(path)
        return memory
    except OSError as error:
        fresh.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise RingError(
                f"{path.parent} has no room for a ring of {size >> 20} MiB: free some, give --ring FILE elsewhere, or "
                "a smaller --ring-mib"
            ) from None
        raise RingError(f"{path} cannot be written ({error.strerror}): choose another with --ring FILE") from None
    finally:
        os.close(file)


def _set_aside(path: Path) -> None:
    """Keep an earlier instance's file under the name NAME.INSTANCE.ring; the last three stay."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            return
    except OSError as error:
        raise RingError(f"{path} cannot be written ({error.strerror}): choose another with --ring FILE") from None
    file = _open(path)
    try:
        # A truncated one will do: its remains are kept like any other's, and its engine can start again.
        words = _read_header(file, path)
        identity = _read_identity(file, path, words)
    finally:
        os.close(file)
    if _status(words) != "down":
        raise RingInUse(
            f"{path} is being written by process {words[_Word.PID]}: give each engine a --ring or an "
            "--engine-name of its own"
        )
    stem = path.name.removesuffix(".ring")
    try:
        path.rename(path.with_name(f"{stem}.{identity.instance}.ring"))
    except OSError as error:
        raise RingError(f"{path} cannot be moved away ({error.strerror}): choose another with --ring FILE") from None
    matches = ((other, _ROTATED.fullmatch(other.name)) for other in path.parent.iterdir())
    kept = [other for other, match in matches if match is not None and match[1] == stem]
    for oldest in sorted(kept, key=lambda other: other.stat().st_mtime)[:-KEPT]:
        oldest.unlink(missing_ok=True)


def _padded(length: int) -> int:
    """Bytes that a record with a payload of `length` takes."""
    return -(-(_RECORD.size + length) // _ALIGN) * _ALIGN


def _process_started(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when it is not there, or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _pid_namespace() -> int:
    """0 when unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
