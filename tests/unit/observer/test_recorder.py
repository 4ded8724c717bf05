"""The ring file: what was written is read, what was overwritten is counted, and nothing else passes for a record."""

from __future__ import annotations

import itertools
import os
import stat
import struct
from pathlib import Path

import pytest

from kvlens.observer.recorder import (
    DEFAULT_CAPACITY,
    HEADER,
    RingError,
    RingReader,
    RingWriter,
    Stores,
    discover,
    open_default,
    ring_directory,
)
from kvlens.observer.schema import Identity

IDENTITY = Identity(name="unit", instance="a" * 32)
SMALL = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.ring"


def a_writer(path: Path, instance: str = "a" * 32, capacity: int = SMALL, **options) -> RingWriter:
    return RingWriter(path, Identity(name="unit", instance=instance), capacity, heartbeat=False, **options)


def payloads(count: int, size: int = 100) -> list[bytes]:
    return [struct.pack("<I", number) + bytes([number % 251]) * (size - 4) for number in range(1, count + 1)]


# -- reading ----------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_in_order(path: Path) -> None:
    writer = a_writer(path)
    written = [(writer.append(payload), payload) for payload in payloads(10)]
    with RingReader(path) as reader:
        assert [tuple(record) for record in reader.read()] == written
        assert reader.read() == [] and reader.lost == 0
        writer.append(b"one more")
        assert reader.read() == [(11, b"one more")]
    writer.close()


def test_a_reader_that_falls_behind_is_told_how_many_it_lost(path: Path) -> None:
    writer = a_writer(path)
    with RingReader(path) as reader:
        for payload in payloads(5):
            writer.append(payload)
        assert len(reader.read()) == 5
        for payload in payloads(200):
            writer.append(payload)
        records = reader.read()
        assert records[-1].sequence == 205
        assert reader.lost == records[0].sequence - 6 > 0
        assert [record.sequence for record in records] == list(range(records[0].sequence, 206))
    writer.close()


def test_a_reader_that_joins_late_begins_with_the_oldest_record_and_lost_nothing(path: Path) -> None:
    writer = a_writer(path)
    for payload in payloads(200):
        writer.append(payload)
    with RingReader(path) as reader:
        records = reader.read()
        assert records[-1] == (200, payloads(200)[-1])
        assert records[0].sequence > 100 and reader.lost == 0
    writer.close()


@pytest.mark.parametrize("before", [0, 10])
def test_what_is_overwritten_before_the_first_read_is_lost_too(path: Path, before: int) -> None:
    writer = a_writer(path)
    written = payloads(200)
    for payload in written[:before]:
        writer.append(payload)
    with RingReader(path) as reader:
        for payload in written[before:]:
            writer.append(payload)
        records = reader.read()
        assert reader.lost == 200 - len(records) > 0
        assert [record.payload for record in records] == written[reader.lost :]
    writer.close()


def test_a_reader_overtaken_between_the_header_and_the_records_believes_no_later_lap(path: Path) -> None:
    writer = a_writer(path)
    written = payloads(400, size=104)  # 128 bytes with their frame: every lap's records lie where the last one's did
    with RingReader(path) as reader:
        for payload in written[:20]:
            writer.append(payload)
        read_words, late = reader._words, iter(written[20:])

        def words() -> tuple[int, ...]:
            """What the header says, and then the writer runs on before the records are copied."""
            found = read_words()
            for payload in itertools.islice(late, 45):
                writer.append(payload)
            return found

        reader._words = words
        records = reader.read()
        assert all(record.payload == written[record.sequence - 1] for record in records)
        sequences = [record.sequence for record in records]
        assert sequences == sorted(set(sequences)) and sequences[-1] == 400
        assert len(records) + reader.lost == 400
    writer.close()


def test_a_limit_leaves_the_rest_for_the_next_call(path: Path) -> None:
    writer = a_writer(path)
    for payload in payloads(9):
        writer.append(payload)
    with RingReader(path) as reader:
        assert [record.sequence for record in reader.read(4)] == [1, 2, 3, 4]
        assert [record.sequence for record in reader.read(4)] == [5, 6, 7, 8]
        assert [record.sequence for record in reader.read()] == [9]
    writer.close()


def test_a_payload_that_does_not_fit_is_refused_and_nothing_is_written(path: Path) -> None:
    writer = a_writer(path)
    with pytest.raises(ValueError, match="longer than the"):
        writer.append(b"x" * (writer.largest + 1))
    writer.append(b"y" * writer.largest)
    with RingReader(path) as reader:
        assert reader.read() == [(1, b"y" * writer.largest)]
    writer.close()


def test_a_record_damaged_on_disk_is_not_believed(path: Path) -> None:
    writer = a_writer(path)
    for payload in payloads(3):
        writer.append(payload)
    with path.open("r+b") as file:
        file.seek(HEADER + 128 + 40)  # inside the second record
        file.write(b"\xff")
    with RingReader(path) as reader:
        assert [record.sequence for record in reader.read()] == [1]
        writer.append(b"later")
        assert reader.read() == [(4, b"later")]
        assert reader.lost == 2
    writer.close()


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_its_owners_alone_and_really_allocated(path: Path) -> None:
    writer = RingWriter(path, IDENTITY, heartbeat=False)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == HEADER + DEFAULT_CAPACITY
    assert status.st_blocks * 512 >= status.st_size
    writer.close()


def test_identity_and_process_are_in_the_header(path: Path) -> None:
    writer = a_writer(path)
    with RingReader(path) as reader:
        assert reader.identity == IDENTITY
        assert (reader.pid, reader.instance, reader.status()) == (os.getpid(), "a" * 32, "up")
    writer.close()


def test_a_clean_end_is_told_from_a_crash(path: Path) -> None:
    writer = a_writer(path)
    with RingReader(path) as reader:
        assert not reader.is_closed
        writer.close()
        writer.close()
        assert reader.is_closed and reader.status() == "down"


def test_a_file_of_an_earlier_instance_is_kept_beside_it_and_only_the_last_three(path: Path) -> None:
    for instance in "abcdef":
        writer = a_writer(path, instance * 32)
        writer.append(instance.encode())
        writer.close()
    kept = {file.name for file in path.parent.iterdir()}
    assert kept == {"engine.ring"} | {f"engine.{instance * 32}.ring" for instance in "cde"}
    with RingReader(path.parent / f"engine.{'d' * 32}.ring") as reader:
        assert reader.read() == [(1, b"d")]


@pytest.mark.parametrize("neighbour", ["engine.two.ring", "engine.[1].ring"])
def test_a_neighbours_earlier_files_are_nobody_elses_to_delete(path: Path, neighbour: str) -> None:
    for instance in "abc":
        a_writer(path.with_name(neighbour), instance * 32).close()
    for instance in "abcdef":
        a_writer(path, instance * 32).close()
    kept = sorted(file.name for file in path.parent.iterdir() if file.name.startswith(neighbour.removesuffix("ring")))
    assert kept == sorted([neighbour, *(neighbour.replace("ring", f"{instance * 32}.ring") for instance in "ab")])


def test_earlier_files_of_a_name_with_brackets_are_three_as_well(path: Path) -> None:
    for instance in "abcdef":
        a_writer(path.with_name("engine[1].ring"), instance * 32).close()
    assert len(list(path.parent.iterdir())) == 4


def test_a_reader_sees_that_its_file_was_replaced_and_can_read_it_to_the_end(path: Path) -> None:
    writer = a_writer(path)
    writer.append(b"last words")
    with RingReader(path) as reader:
        assert not reader.is_replaced
        writer.close()
        successor = a_writer(path, "b" * 32)
        assert reader.is_replaced and reader.read() == [(1, b"last words")]
        successor.close()


def test_discovery_leaves_out_earlier_instances(path: Path) -> None:
    for instance in "ab":
        a_writer(path, instance * 32).close()
    assert discover(path.parent) == [path]


def test_discovery_finds_an_engine_whose_name_ends_like_a_number(path: Path) -> None:
    ring = path.with_name("host.12345678.ring")
    a_writer(ring).close()
    assert discover(path.parent) == [ring]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_two_engines_cannot_write_one_file(path: Path) -> None:
    writer = a_writer(path)
    with pytest.raises(RingError, match=f"being written by process {os.getpid()}: give each engine"):
        a_writer(path, "b" * 32)
    writer.append(b"undisturbed")
    writer.close()


def test_a_file_that_is_no_ring_is_not_overwritten(path: Path) -> None:
    path.write_bytes(b"somebody's thesis" * 1000)
    with pytest.raises(RingError, match="is no flight recorder"):
        a_writer(path)
    assert path.read_bytes().startswith(b"somebody's thesis")


def test_a_truncated_file_of_a_dead_engine_is_kept_and_its_engine_starts_again(path: Path) -> None:
    a_writer(path).close()
    os.truncate(path, HEADER + 300)
    with pytest.raises(RingError, match="is truncated to 4,396 of 8,192 bytes: restart its engine for a new one"):
        RingReader(path)
    a_writer(path, "b" * 32).close()
    assert path.with_name(f"engine.{'a' * 32}.ring").stat().st_size == HEADER + 300
    with RingReader(path) as reader:
        assert reader.instance == "b" * 32


def test_a_truncated_file_of_a_living_engine_stays_its_own(path: Path) -> None:
    writer = a_writer(path)
    os.truncate(path, HEADER)  # short of records only: another store into the header is no fault
    with pytest.raises(RingError, match=f"being written by process {os.getpid()}"):
        a_writer(path, "b" * 32)
    writer.close()


def test_a_directory_or_a_pipe_is_no_ring(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RingError, match="is no file: give --ring the file of an engine"):
            RingReader(place)


def test_a_short_file_of_somebody_else_is_not_called_a_truncated_ring(path: Path) -> None:
    path.write_text("a note")
    with pytest.raises(RingError, match="is no flight recorder"):
        RingReader(path)


@pytest.mark.parametrize("word, value", [(2, 0), (2, 17), (11, 1), (11, 1 << 60)])
def test_a_damaged_header_says_what_to_do(path: Path, word: int, value: int) -> None:
    a_writer(path).close()
    with path.open("r+b") as file:
        file.seek(8 * word)
        file.write(struct.pack("<Q", value))
    with pytest.raises(RingError, match=r"has a damaged header \(.*delete it and restart its engine"):
        RingReader(path)


def test_a_file_of_another_version_says_which(path: Path) -> None:
    a_writer(path).close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<Q", 99))
    with pytest.raises(RingError, match="has format 99, this kvlens reads 1"):
        RingReader(path)


def test_a_truncated_file_says_so_and_kills_nobody(path: Path) -> None:
    writer = a_writer(path)
    with RingReader(path) as reader:
        writer.append(b"read before")
        assert len(reader.read()) == 1
        for payload in payloads(20):
            writer.append(payload)
        writer.close()
        os.truncate(path, HEADER + 300)
        assert len(reader.read()) < 20
        os.truncate(path, 10)
        with pytest.raises(RingError, match="is truncated to 10 bytes"):
            reader.read()
    with pytest.raises(RingError, match="truncated"):
        RingReader(path)


def test_a_missing_file_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(RingError, match=r"there is no ring .*start the engine with --ring"):
        RingReader(path)


def test_a_directory_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RingError, match=r"cannot be written .*choose another with --ring"):
        a_writer(tmp_path / "nowhere" / "engine.ring")


def test_a_full_disk_is_a_message_and_the_next_directory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.posix_fallocate, []

    def full(file: int, offset: int, size: int) -> None:
        if not refused:
            refused.append(size)
            raise OSError(28, "No space left on device")
        real(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "first"))
    writer, passed = open_default("host:1", IDENTITY, SMALL)
    assert len(passed) == 1 and "has no room for a ring" in passed[0]
    assert writer.path.name == "host_1.ring" and tmp_path / "first" not in writer.path.parents
    assert list((tmp_path / "first" / "kvlens").iterdir()) == []
    writer.close()
    writer.path.unlink()


def test_the_runtime_directory_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ring_directory() == tmp_path / "kvlens"
    assert stat.S_IMODE(ring_directory().stat().st_mode) == 0o700


# -- crash images -----------------------------------------------------------------------------------------------------


class Images(Stores):
    """Keeps what the file looks like after every store; long ones are torn into pieces, last piece first as well."""

    taken: list[bytes]

    def snap(self) -> None:
        type(self).taken.append(bytes(self._view))

    def word(self, index: int, value: int) -> None:
        super().word(index, value)
        self.snap()

    def data(self, offset: int, content: bytes) -> None:
        before = bytes(self._view[offset : offset + len(content)])
        third = max(1, len(content) // 3)
        for start in range(0, len(content), third):
            super().data(offset + start, content[start : start + third])
            self.snap()
        super().data(offset, before)
        for start in reversed(range(0, len(content), third)):
            super().data(offset + start, content[start : start + third])
            self.snap()


def test_after_every_single_store_every_record_that_is_read_is_right(path: Path) -> None:
    Images.taken = []
    writer = a_writer(path, stores=Images)
    written: dict[int, bytes] = {}
    complete: list[int] = []  # by image: the newest record that was written when it was taken
    sizes = [1, 900, 37, 500, 16, 8, 1000, 250, 333, 64, 700, 12] * 6
    for number, size in enumerate(sizes, 1):
        payload = bytes([number % 256]) * size
        written[number] = payload
        writer.append(payload)
        complete += [number - 1] * (len(Images.taken) - len(complete))
    image = path.with_name("image.ring")
    for at, content in enumerate(Images.taken):
        image.write_bytes(content)
        with RingReader(image) as reader:
            records = reader.read()
        assert all(written[record.sequence] == record.payload for record in records)
        sequences = [record.sequence for record in records]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) if sequences else complete[at] == 0
        newest = sequences[-1] if sequences else 0
        assert newest in (complete[at], complete[at] + 1), f"image {at}: newest {newest}, complete {complete[at]}"
    assert writer._position > 4 * writer.capacity
    writer.close()
