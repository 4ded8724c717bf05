"""Benches run and say what they promise; how fast anything is decides no test."""

from __future__ import annotations

from kvlens.cli.bench_overhead import bench_overhead
from kvlens.cli.bench_publish import bench_publish
from kvlens.engine.bench.generate import bench_generate
from kvlens.engine.model.config import resolve_model


def test_publish() -> None:
    results = bench_publish(rows=(2, 40), frames=5)
    assert [row["held_rows"] for row in results] == [2, 40]
    assert all(row["step_frame_us"] > 0 and row["key_frame_us"] > 0 for row in results)


def test_overhead() -> None:
    (row,) = bench_overhead(batches=(2,), pairs=10)
    assert row["pairs"] == 10 and row["low"] <= row["ratio"] <= row["high"]
    assert row["observed_tokens_per_second"] > 0


def test_generate() -> None:
    (row,) = bench_generate(resolve_model("builtin"), batches=(2,), new_tokens=4, rounds=1)
    assert row["batch"] == 2 and row["ratio"] > 0
