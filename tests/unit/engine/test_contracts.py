"""A named check that fails is always told; only strict mode also raises."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvlens.engine.contracts import CHECKS, Contracts, KvContractError, Mode
from kvlens.engine.probe import CheckFailed, NullProbe
from kvlens.engine.record import ReqKvInfo


class Recording(NullProbe):
    def __init__(self) -> None:
        self.events: list[CheckFailed] = []

    def emit(self, event) -> None:
        self.events.append(event)


def a_held_record() -> ReqKvInfo:
    record = ReqKvInfo()
    record.bind(3, 7, np.zeros((4, 5), np.int32))
    record.cache_protected_len, record.kv_committed_len, record.kv_allocated_len = 4, 10, 11
    return record


@pytest.mark.parametrize("mode", list(Mode))
def test_a_check_that_holds_is_silent(mode) -> None:
    probe = Recording()
    assert Contracts(mode, probe).require(CHECKS.locks_balance, True) is True
    assert probe.events == []


def test_report_mode_answers_false_and_tells_the_records_lengths_and_the_numbers_compared() -> None:
    probe = Recording()
    contracts = Contracts(Mode.REPORT, probe, step=lambda: 42)
    answer = contracts.require(
        CHECKS.committed_within_allocated,
        False,
        record=a_held_record(),
        request=5,
        hint="do this",
        facts={"committed": 10, "allocated": 11},
    )
    assert answer is False
    (failed,) = probe.events
    assert (failed.check, failed.step, failed.request) == ("committed-within-allocated", 42, 5)
    assert (failed.row, failed.generation) == (3, 7)
    assert (failed.protected_tokens, failed.committed_tokens, failed.allocated_tokens) == (4, 10, 11)
    assert (failed.hint, failed.facts) == ("do this", {"committed": 10, "allocated": 11})


def test_strict_mode_tells_before_it_raises_and_the_message_has_the_numbers() -> None:
    probe = Recording()
    with pytest.raises(KvContractError, match=r"^locks-balance: .*\(lock_ref 1,234\) do this") as raised:
        Contracts(Mode.STRICT, probe).require(CHECKS.locks_balance, False, hint="do this", facts={"lock_ref": 1234})
    assert raised.value.check is CHECKS.locks_balance and len(probe.events) == 1


def test_the_strict_message_names_the_record() -> None:
    with pytest.raises(KvContractError, match=r"row=3, generation=7, P=4, C=10, A=11"):
        Contracts(Mode.STRICT).require(CHECKS.held_xor_released, False, record=a_held_record())


def test_what_is_not_known_is_minus_one() -> None:
    probe = Recording()
    contracts = Contracts(Mode.REPORT, probe)
    contracts.require(CHECKS.locks_balance, False)
    contracts.require(CHECKS.free_needs_held_row, False, record=ReqKvInfo())
    without_record, without_row = probe.events
    assert (without_record.row, without_record.generation, without_record.allocated_tokens) == (-1, -1, -1)
    assert (without_row.row, without_row.generation, without_row.allocated_tokens) == (-1, 0, 0)


def test_a_failing_check_needs_nobody_who_watches() -> None:
    assert Contracts().require(CHECKS.locks_balance, False) is False


def test_every_check_has_a_name_of_its_own_a_severity_and_a_sentence() -> None:
    checks = CHECKS.all()
    assert len({check.name for check in checks}) == len(checks) == 14
    for check in checks:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)+", check.name), check.name
        assert getattr(CHECKS, check.name.replace("-", "_")) is check
        assert check.severity in {"critical", "warning"} and check.description.endswith(".")
