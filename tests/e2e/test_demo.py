"""`kvlens demo`, as the README says it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvlens.engine.faults.catalog import FAULTS


def demo(*arguments: str) -> tuple[int, dict[str, object]]:
    command = [sys.executable, "-m", "kvlens", "demo", "--headless", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_healthy_run_ends_with_0_and_every_slot_accounted_for() -> None:
    code, result = demo("--seconds", "12")
    assert code == 0, result
    assert result["findings"] == [] and result["assertions"] == {}
    assert result["frames"]["published"] > 50 and result["frames"]["lost"] == 0
    assert result["requests"]["finished"] > 5 and result["requests"]["aborted"] > 0
    assert result["users"]["errors"] == []
    assert result["tokens_per_second"] > 0
    assert result["steps"] > 0
    assert result["allocated_tokens_max"] >= result["committed_tokens_max"] > 0
    pools = {pool["pool"]: pool for pool in result["pools"]}
    assert set(pools) == {"rows", "full"}
    for pool in pools.values():
        assert pool["unaccounted"] == 0
        assert pool["free"] + pool["evictable"] == pool["size_slots"]
    assert pools["full"]["evictable"] > 0


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_each_fault_ends_with_1_and_one_finding_of_its_kind(fault) -> None:
    code, result = demo("--seconds", "12", "--fault", fault.name)
    assert code == 1, result
    assert [found["kind"] for found in result["findings"]] == [fault.kind], result["findings"]
    assert result["findings"][0]["leaked_slots"] >= (0 if fault.kind == "record_reused_after_release" else 1)


def test_a_leak_is_named_by_pool_amount_row_generation_and_request() -> None:
    code, result = demo("--seconds", "12", "--fault", "abort-skips-release")
    assert code == 1
    (found,) = result["findings"]
    full = next(pool for pool in result["pools"] if pool["pool"] == "full")
    rows = next(pool for pool in result["pools"] if pool["pool"] == "rows")
    assert found["kind"] == "orphan_row" and found["pool"] == "full"
    assert found["leaked_slots"] == full["unaccounted"] == found["evidence"]["residual_slots"] > 0
    assert found["leaked_rows"] == rows["unaccounted"] == 1
    assert found["row"] > 0 and found["generation"] > 0
    assert found["request_id"].startswith("cmpl-")
    assert len(found["trace_id"]) == 32
