"""The KV record and the request that carries it: what is held, and by whom. Imports without torch and numpy.

Lengths of all held rows live in one table, `int32 [4, rows + 1]`, owned by the row pool; a record that holds a row is a
view of one column of it. So the engine changes the lengths of a whole batch, and the probe sums them, in one operation,
and there is still only one place where a length is written down. A record without a row keeps its lengths itself.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROTECTED: Final = 0
COMMITTED: Final = 1
ALLOCATED: Final = 2
EVICTED: Final = 3
LENGTHS: Final = 4


class ReqKvInfo:
    """What one holder (a request, or a session between turns) holds of the KV pools.

    Lengths are tokens of the holder's own sequence, half-open from 0:

    | range  | owner                                                              |
    |--------|--------------------------------------------------------------------|
    | [0, P) | the prefix cache, locked for this holder; P is page-aligned        |
    | [P, A) | the holder, up to the end of the page that A falls into            |
    | [0, C) | content is promised; C <= A. C survives a release, A does not      |

    So C never answers "does it hold KV?": ask `holds_kv`.
    """

    __slots__ = ("_lengths", "_row", "generation")

    def __init__(self) -> None:
        self._row: int | None = None
        self._lengths: NDArray[np.int32] | array[int] = array("i", bytes(4 * LENGTHS))
        self.generation = 0
        """Hand-outs of the row up to the one this record got; (row, generation) names a tenancy."""

    # -- presence ---------------------------------------------------------------------------------------------------

    @property
    def holds_kv(self) -> bool:
        """A row is registered: the one test of presence."""
        return self._row is not None

    @property
    def is_kv_released(self) -> bool:
        """Nothing is allocated and no window cursor stands: the complement of `holds_kv` outside a release."""
        return self.kv_allocated_len == 0 and self.swa_evicted_seqlen == 0

    @property
    def req_pool_idx(self) -> int | None:
        """Row of the request-to-token table, or None. Set by the row pool through `bind` and `unbind`."""
        return self._row

    @req_pool_idx.setter
    def req_pool_idx(self, row: int | None) -> None:
        if row is not None and row < 1:
            raise ValueError(f"row {row} cannot be held: rows start at 1, and a record without a row says None")
        self._row = row

    @property
    def held_row(self) -> int:
        """The row. Raises ValueError when none is held: ask `holds_kv` first."""
        if self._row is None:
            raise ValueError("no row is held")
        return self._row

    # -- lengths ----------------------------------------------------------------------------------------------------

    @property
    def cache_protected_len(self) -> int:
        """P: the cache owns [0, P) and keeps it locked for this holder; page-aligned."""
        return int(self._lengths[PROTECTED])

    @cache_protected_len.setter
    def cache_protected_len(self, tokens: int) -> None:
        self._lengths[PROTECTED] = tokens

    @property
    def kv_committed_len(self) -> int:
        """C: content counted as committed in [0, C). Kept by a release."""
        return int(self._lengths[COMMITTED])

    @kv_committed_len.setter
    def kv_committed_len(self, tokens: int) -> None:
        self._lengths[COMMITTED] = tokens

    @property
    def kv_allocated_len(self) -> int:
        """A: slots exist for [0, A)."""
        return int(self._lengths[ALLOCATED])

    @kv_allocated_len.setter
    def kv_allocated_len(self, tokens: int) -> None:
        self._lengths[ALLOCATED] = tokens

    @property
    def swa_evicted_seqlen(self) -> int:
        """E: window slots below it were already freed."""
        return int(self._lengths[EVICTED])

    @swa_evicted_seqlen.setter
    def swa_evicted_seqlen(self, tokens: int) -> None:
        self._lengths[EVICTED] = tokens

    # -- transitions ------------------------------------------------------------------------------------------------

    def bind(self, row: int, generation: int, table: NDArray[np.int32]) -> None:
        """Register a row: the lengths move into column `row` of `table` (int32 [4, rows + 1])."""
        column = table[:, row]
        column[:] = self._lengths
        self._lengths = column
        self.generation = generation
        self.req_pool_idx = row

    def unbind(self) -> None:
        """Give the row up: the lengths move back into the record, and the table's column becomes zero."""
        column = self._lengths
        self.disown()
        for length in range(LENGTHS):
            column[length] = 0

    def disown(self) -> None:
        """Lose a row that may be another's by now: the lengths are copied out, and the table is not touched."""
        self._lengths = array("i", self._lengths.tolist())
        self._row = None

    def mark_kv_released(self) -> None:
        """A := 0 and E := 0, once the row was freed. C stays: it is a statement about content."""
        self.kv_allocated_len = 0
        self.swa_evicted_seqlen = 0

    def __repr__(self) -> str:
        return (
            f"ReqKvInfo(row={self._row}, generation={self.generation}, P={self.cache_protected_len}, "
            f"C={self.kv_committed_len}, A={self.kv_allocated_len})"
        )


class Phase(IntEnum):
    """Where a request is. The value crosses the frame as one byte per held row."""

    WAITING = 0
    CHUNKED = 1
    """Between two chunks of its prompt: holds a row, is in no batch."""
    PREFILL = 2
    RUNNING = 3
    FINISHED = 4
    ABORTED = 5
    ORPHAN = 6
    """No request is ever in it: the probe gives it to a row that is taken, and that nobody in queue or batch holds."""


class FinishReason:
    """Why a request ended: `kind` is what clients see."""

    __slots__ = ("kind", "matched", "message", "status")

    def __init__(self, kind: str, *, matched: str | int | None = None, message: str = "", status: int = 200) -> None:
        self.kind = kind  # "stop", "length" or "abort"
        self.matched = matched  # the stop string or token id
        self.message = message  # for an abort: what happened and what to do
        self.status = status  # HTTP status an abort maps to

    @property
    def is_abort(self) -> bool:
        return self.kind == "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. `temperature` 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class Req:
    """One request on its way through the engine. Compared by identity."""

    number: int
    """Running number, never reused within an engine instance; what events carry."""
    rid: str
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    trace: str | None = None
    """The caller's `traceparent`, as received."""
    namespace: str | None = None
    """Requests of different namespaces share no cached prefix."""

    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    output_ids: list[int] = field(default_factory=list)
    prefix_indices: NDArray[np.int64] = field(default_factory=lambda: _no_slots())
    """Slots of the positions already computed: what the next extend continues."""
    last_node: Any = None
    """The cache's node this request holds a lock on, or None."""
    extend_start: int = 0
    extend_end: int = 0
    """Positions [start, end) that the current prefill computes."""
    phase: Phase = Phase.WAITING
    finish: FinishReason | None = None
    to_finish: FinishReason | None = None
    """Set from outside (abort); becomes `finish` when the running step's results are applied."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache, counted at the first admission only."""
    retractions: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt_ids + self.output_ids

    @property
    def seq_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def restart(self) -> None:
        """Forget what was computed: the next extend begins at position 0. The record keeps its row, if it has one."""
        self.prefix_indices = _no_slots()
        self.last_node = None
        self.extend_start = 0
        self.kv.cache_protected_len = 0

    def reset_for_retract(self) -> None:
        """Back to a waiting request without KV; its output stays, and is prefilled again with the prompt.

        Raises ValueError if a row is still held.
        """
        if self.kv.holds_kv:
            raise ValueError(
                f"request {self.rid} still holds row {self.kv.req_pool_idx}: release it before a retraction"
            )
        self.kv = ReqKvInfo()
        self.restart()
        self.extend_end = 0
        self.phase = Phase.WAITING
        self.retractions += 1


def _no_slots() -> NDArray[np.int64]:
    import numpy as np  # here, because the observer reads the names above without it

    return np.empty(0, np.int64)
