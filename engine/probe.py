"""The port through which the engine tells whoever watches, and the events it tells. Imports without torch.

The engine calls `emit` when something happens and `step` at each quiet moment; it never waits for an answer. Events are
facts in the past tense made of plain values. `at_ns` is the monotonic clock in nanoseconds; `request` is the running
number, whose id came with `RequestQueued`; (row, generation) names one tenancy of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Event(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all events: positional on the wire, told apart by their class name."""


# -- requests ---------------------------------------------------------------------------------------------------------


class RequestQueued(Event, frozen=True):
    """A request was accepted; introduces its id and trace context."""

    at_ns: int
    request: int
    rid: str
    trace: str | None
    prompt_tokens: int
    max_new_tokens: int


class RequestScheduled(Event, frozen=True):
    """A request left the queue and got (or keeps) a row."""

    at_ns: int
    request: int
    row: int
    generation: int
    cached_tokens: int
    """Prefix found in the cache at this admission."""
    queried_tokens: int
    """Tokens the cache was asked for."""


class ChunkComputed(Event, frozen=True):
    """Positions [start, end) of a prompt were computed."""

    started_ns: int
    at_ns: int
    request: int
    start: int
    end: int
    last: bool


class FirstToken(Event, frozen=True):
    """The first output token of a request was sampled (once, also across retractions)."""

    at_ns: int
    request: int


class RequestRetracted(Event, frozen=True):
    """A running request gave its KV back under memory pressure and went back to the queue."""

    at_ns: int
    request: int
    output_tokens: int


class AbortRequested(Event, frozen=True):
    """Somebody wants a request gone; `phase` is where it was: waiting, chunked, prefill or running."""

    at_ns: int
    request: int
    phase: str


class RequestFinished(Event, frozen=True):
    """A request ended. `outcome` is stop, length or abort."""

    at_ns: int
    request: int
    outcome: str
    output_tokens: int
    cached_tokens: int
    retractions: int
    message: str


# -- rows -------------------------------------------------------------------------------------------------------------


class RowTaken(Event, frozen=True):
    """A row was handed out. `site` names the code path that took it."""

    step: int
    row: int
    generation: int
    request: int
    site: str


class RowSet(Event, frozen=True):
    """Lengths or phase of a held row changed other than by a decode step (extend, insertion, trim)."""

    row: int
    generation: int
    phase: int
    protected_tokens: int
    committed_tokens: int
    allocated_tokens: int


class DecodeStepped(Event, frozen=True):
    """C and A of every row whose phase is RUNNING grew by `tokens`; there were `rows` of them."""

    at_ns: int
    rows: int
    tokens: int


class RowReturned(Event, frozen=True):
    """A row went back to its pool. Lengths are those just before."""

    step: int
    row: int
    generation: int
    request: int
    committed_tokens: int
    allocated_tokens: int


class KvReleased(Event, frozen=True):
    """The release path ended for one tenancy. Whole pages, in tokens: P + the four parts = ceil(A)."""

    started_ns: int
    at_ns: int
    request: int
    row: int
    generation: int
    protected_tokens: int
    allocated_tokens: int
    inserted_tokens: int
    duplicate_tokens: int
    body_tokens: int
    tail_tokens: int


# -- cache ------------------------------------------------------------------------------------------------------------


class Evicted(Event, frozen=True):
    """The prefix cache gave slots back to the allocator."""

    asked_tokens: int
    freed_tokens: int


class NodeSplit(Event, frozen=True):
    """A tree node was cut in two."""

    upper_tokens: int
    lower_tokens: int


class CacheFlushed(Event, frozen=True):
    """Cache, rows and slots were reset to empty."""

    step: int


# -- contracts and census ---------------------------------------------------------------------------------------------


class CheckFailed(Event, frozen=True):
    """A named check did not hold. Record fields are -1 where there was no record; `facts` are the numbers compared."""

    at_ns: int
    step: int
    check: str
    request: int
    row: int
    generation: int
    protected_tokens: int
    committed_tokens: int
    allocated_tokens: int
    hint: str
    facts: dict[str, int]


class SlotRange(msgspec.Struct, frozen=True, array_like=True):
    """Slots [start, end) of a pool, and the tenancy whose row last referenced them (0: unknown)."""

    start: int
    end: int
    row: int
    generation: int
    request: int


class OwnerRun(msgspec.Struct, frozen=True, array_like=True):
    """Slots [start, end) in one state: free, tree, row, session or unowned; `row` where a row owns them."""

    start: int
    end: int
    state: str
    row: int


class CensusTaken(Event, frozen=True):
    """The exact partition of one pool at a quiet moment. Leaked and doubly owned ranges come first and whole.

    `truncated` says that `owners` was cut to keep the frame small; the other lists never are.
    """

    step: int
    pool: str
    unowned: list[SlotRange]
    held_and_free: list[SlotRange]
    held_twice: list[SlotRange]
    duplicate_free: list[SlotRange]
    owners: list[OwnerRun]
    truncated: bool


AnyEvent = (
    RequestQueued
    | RequestScheduled
    | ChunkComputed
    | FirstToken
    | RequestRetracted
    | AbortRequested
    | RequestFinished
    | RowTaken
    | RowSet
    | DecodeStepped
    | RowReturned
    | KvReleased
    | Evicted
    | NodeSplit
    | CacheFlushed
    | CheckFailed
    | CensusTaken
)


# -- the port ---------------------------------------------------------------------------------------------------------


class PoolView(Protocol):
    """One slot pool, read only. Sizes are slots."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def bytes_per_slot(self) -> int: ...
    def free(self) -> int: ...
    def evictable(self) -> int: ...
    def protected(self) -> int: ...
    def free_slots(self) -> NDArray[np.int64]:
        """Every slot in the free list, duplicates included; for the census."""
        ...

    def tree_slots(self) -> NDArray[np.int64]:
        """Every slot owned by the prefix cache; for the census."""
        ...


class Holders(msgspec.Struct, frozen=True):
    """Everything that holds a row, as reached from queues and batches at this quiet moment; arrays of one length."""

    rows: NDArray[np.int64]
    requests: NDArray[np.int64]
    phases: NDArray[np.uint8]


class EngineView(Protocol):
    """What a probe may look at during `step`; valid only inside that call."""

    @property
    def step(self) -> int: ...
    @property
    def mode(self) -> str:
        """What the step ran: prefill, decode or idle."""
        ...

    @property
    def pools(self) -> Sequence[PoolView]: ...
    @property
    def row_size(self) -> int:
        """Usable rows."""
        ...

    def free_rows(self) -> NDArray[np.int64]: ...
    @property
    def free_row_count(self) -> int: ...
    def holders(self) -> Holders: ...
    @property
    def lengths(self) -> NDArray[np.int32]:
        """P, C, A, E of every row, [4, rows + 1]; zero where no record is bound."""
        ...

    @property
    def generations(self) -> NDArray[np.int64]:
        """Hand-outs of every row, [rows + 1]."""
        ...

    @property
    def tenants(self) -> NDArray[np.int64]:
        """Running number of the request that last took each row, [rows + 1]; 0 before the first."""
        ...

    def row_slots(self, row: int) -> NDArray[np.int32]:
        """The whole line of the request-to-token table, not a copy; positions beyond A are stale."""
        ...

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        ...

    @property
    def queued(self) -> Sequence[tuple[int, str, str | None]]:
        """(number, id, trace) of every live request, for key frames."""
        ...


class Probe(Protocol):
    """Told by the engine, on its scheduler thread. Must not block, must not raise."""

    def emit(self, event: AnyEvent) -> None:
        """Something happened."""
        ...

    def step(self, view: EngineView) -> None:
        """A quiet moment: results are applied, no free group is open. Called after each step and about once a second
        when idle."""
        ...

    def close(self) -> None:
        """The engine stops."""
        ...


class NullProbe:
    """Watches nothing."""

    def emit(self, event: AnyEvent) -> None:
        pass

    def step(self, view: EngineView) -> None:
        pass

    def close(self) -> None:
        pass
