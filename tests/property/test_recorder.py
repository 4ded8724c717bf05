"""Law of the ring: a reader gets exactly what was written, less what it says it lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.observer.recorder import RingReader, RingWriter
from kvlens.observer.schema import Identity

STEPS = st.lists(
    st.one_of(st.integers(0, 1000).map(lambda size: ("write", size)), st.integers(1, 20).map(lambda n: ("read", n))),
    max_size=120,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STEPS)
def test_read_and_lost_make_up_what_was_written(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "a.ring"
        writer = RingWriter(path, Identity("a", "0" * 32), 4096, heartbeat=False)
        written: dict[int, bytes] = {}
        with RingReader(path) as reader:
            got: dict[int, bytes] = {}
            for step, amount in [*steps, ("read", 1 << 30)]:
                if step == "write":
                    payload = len(written).to_bytes(4, "little") * (amount // 4)
                    written[writer.append(payload)] = payload
                else:
                    for sequence, payload in reader.read(amount):
                        assert sequence not in got and sequence > max(got, default=0)
                        got[sequence] = payload
            assert all(written[sequence] == payload for sequence, payload in got.items())
            assert len(got) + reader.lost == len(written)
            assert max(got, default=0) == len(written)
        writer.close()
