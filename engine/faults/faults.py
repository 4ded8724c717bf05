"""Switches faults on and off in a running engine, by wrapping methods of its own objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.engine.faults.catalog import FAULTS
from kvlens.engine.memory.release import release_kv_cache
from kvlens.engine.record import Phase, Req

if TYPE_CHECKING:
    from kvlens.engine.engine import Engine


@dataclass(slots=True)
class _Armed:
    left: int | None  # None: until disabled

    def fire(self) -> bool:
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


class Faults:
    """The faults of one engine. `enable` and `disable` run on the scheduler's thread; post them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._armed: dict[str, _Armed] = {}
        self._wrapped = False

    def enable(self, name: str, times: int | None = 1) -> None:
        """Let the next `times` occasions go wrong; None: every one. Raises KeyError for a name that is no fault."""
        self._armed[FAULTS[name].name] = _Armed(times)
        if not self._wrapped:
            self._wrapped = True
            scheduler, rows = self._engine.scheduler, self._engine.memory.rows
            scheduler.release = self._release(scheduler.release)
            rows.alloc = self._alloc(rows.alloc)  # type: ignore[method-assign]

    def disable(self, name: str) -> None:
        """Raises KeyError for a name that is no fault."""
        self._armed.pop(FAULTS[name].name, None)

    def active(self) -> list[str]:
        """Faults whose next occasion will go wrong."""
        return [name for name, armed in self._armed.items() if armed.left is None or armed.left > 0]

    def _fires(self, name: str) -> bool:
        armed = self._armed.get(name)
        return armed is not None and armed.fire()

    def _release(self, release: Callable[..., None]) -> Callable[..., None]:
        def wrapped(req: Req, *, is_insert: bool) -> None:
            ended = req.to_finish is not None
            private = req.kv.kv_allocated_len - req.kv.cache_protected_len
            if ended and req.kv.holds_kv and private > 0 and self._fires("abort-skips-release"):
                return
            if not ended and is_insert and private > 0 and self._fires("double-free"):
                self._free_twice(req, release)
                return
            release(req, is_insert=is_insert)

        return wrapped

    def _free_twice(self, req: Req, release: Callable[..., None]) -> None:
        memory, start = self._engine.memory, req.kv.cache_protected_len
        body = memory.cache.row_slots(req, req.kv.kv_allocated_len)[start:]
        release(req, is_insert=False)
        memory.slots.free_segment(body, start)

    def _alloc(self, alloc: Callable[..., list[int] | None]) -> Callable[..., list[int] | None]:
        def wrapped(reqs: Sequence[Req], site: str) -> list[int] | None:
            for req in reqs:
                between_chunks = req.phase is Phase.CHUNKED and req.kv.holds_kv
                if between_chunks and self._fires("chunk-reuses-released-row"):
                    row = req.kv.req_pool_idx
                    release_kv_cache(req, self._engine.memory, is_insert=False)
                    req.kv.req_pool_idx = row
            return alloc(reqs, site)

        return wrapped
