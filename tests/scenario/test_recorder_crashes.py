"""Writers killed with SIGKILL at random moments: the ring is readable, and its last complete record is right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

from kvlens.observer.recorder import RingReader

WRITE_FOREVER = """
import sys, zlib
from pathlib import Path
from kvlens.observer.recorder import RingWriter
from kvlens.observer.schema import Identity
writer = RingWriter(Path(sys.argv[1]), Identity("crash", sys.argv[2]), 1 << 16)
number = 0
print("writing", flush=True)
while True:
    number += 1
    body = number.to_bytes(8, "little") * (1 + number % 97)
    writer.append(zlib.crc32(body).to_bytes(4, "little") + body)
"""
WRITERS, AT_ONCE = 90, 3


def test_ninety_writers_killed_in_mid_write(tmp_path: Path) -> None:
    dice = random.Random(20)
    furthest = 0
    for begin in range(0, WRITERS, AT_ONCE):
        writers = []
        for number in range(begin, begin + AT_ONCE):
            path = tmp_path / f"{number}.ring"
            command = [sys.executable, "-c", WRITE_FOREVER, str(path), f"{number:032x}"]
            writers.append((path, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        for path, process in writers:
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
            time.sleep(dice.uniform(0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            furthest = max(furthest, check(path))
    assert furthest > 1000  # some went round the ring many times


def check(path: Path) -> int:
    """The sequence of the last record, after looking at all of them."""
    with RingReader(path) as reader:
        assert reader.status() == "down" and not reader.is_closed
        records = reader.read()
        for record in records:
            body = record.payload[4:]
            assert zlib.crc32(body).to_bytes(4, "little") == record.payload[:4]
            assert body == record.sequence.to_bytes(8, "little") * (1 + record.sequence % 97)
        sequences = [record.sequence for record in records]
        assert sequences == list(range(sequences[0], sequences[-1] + 1)) if sequences else True
        assert reader.lost == 0
        return sequences[-1] if sequences else 0
