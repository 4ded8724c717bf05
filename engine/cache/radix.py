"""The radix cache: a tree of token stretches of whole pages, shared by everyone who starts alike."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.engine.cache.base import MatchResult, PrefixCache, ReleasedParts
from kvlens.engine.contracts import CHECKS
from kvlens.engine.probe import Evicted, NodeSplit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.contracts import Contracts
    from kvlens.engine.pools.rows import ReqToTokenPool
    from kvlens.engine.pools.slots import SlotAllocator
    from kvlens.engine.probe import Probe
    from kvlens.engine.record import Req


class Node:
    """One stretch of tokens and the slots that hold it. Children are found by the first page of their key."""

    __slots__ = ("children", "epoch", "key", "lock_ref", "parent", "queued", "used", "value")

    def __init__(self, key: NDArray[np.int64], value: NDArray[np.int64], parent: Node | None, epoch: int) -> None:
        self.key = key
        self.value = value
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.lock_ref = 0
        self.used = 0  # clock tick of the last visit
        self.queued = False  # has an entry in the eviction heap
        self.epoch = epoch  # the tree it belongs to; a reset starts a new one

    def __len__(self) -> int:
        return len(self.key)

    @property
    def is_evictable_leaf(self) -> bool:
        return self.parent is not None and self.lock_ref == 0 and not self.children


class RadixCache(PrefixCache):
    """Page-aligned radix tree with path locks, evicted least recently used first.

    Eviction keeps one lazy heap: a node enters when it becomes an unlocked leaf; an entry that is out of date when it
    surfaces is dropped or put back. So an eviction costs what it frees, not what the tree holds.
    """

    def __init__(self, rows: ReqToTokenPool, slots: SlotAllocator, *, contracts: Contracts, probe: Probe) -> None:
        super().__init__(rows, slots)
        self._contracts = contracts
        self._probe = probe
        self._epoch = 0
        self.reset()

    def reset(self) -> None:
        self._epoch += 1
        self._roots: dict[str | None, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []
        self._entries = 0
        self._clock = 0
        self._evictable = 0
        self._protected = 0

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    # -- finding ----------------------------------------------------------------------------------------------------

    def match_prefix(self, tokens: Sequence[int], namespace: str | None = None) -> MatchResult:
        key = np.asarray(tokens, np.int64)
        path = self._walk(key[: self.floor(len(key))], namespace)
        if not path:
            return MatchResult(np.empty(0, np.int64), None)
        return MatchResult(np.concatenate([node.value for node in path]), path[-1])

    def _walk(self, key: NDArray[np.int64], namespace: str | None) -> list[Node]:
        """The nodes that spell the longest prefix of `key`; the last is split when the prefix ends inside it."""
        self._clock += 1
        node = self._root(namespace)
        path: list[Node] = []
        at = 0
        while at < len(key):
            child = node.children.get(self._page_key(key[at:]))
            if child is None:
                break
            shared = self._shared(child.key, key[at:])
            if shared < len(child):
                child = self._split(child, shared)
            child.used = self._clock
            path.append(child)
            at += shared
            node = child
        return path

    def _root(self, namespace: str | None) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            empty = np.empty(0, np.int64)
            root = self._roots[namespace] = Node(empty, empty, None, self._epoch)
        return root

    def _page_key(self, key: NDArray[np.int64]) -> bytes:
        return key[: self.page_size].tobytes()

    def _shared(self, one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
        """Length of the common prefix, in whole pages."""
        length = min(len(one), len(other))
        differs = one[:length] != other[:length]
        first = int(differs.argmax()) if differs.any() else length
        return self.floor(first)

    def _split(self, lower: Node, at: int) -> Node:
        """Cut a node in two and return the upper part.

        The lower part keeps its identity, so locks held on it stay valid; the upper part inherits their number.
        """
        parent = lower.parent
        assert parent is not None
        upper = Node(lower.key[:at], lower.value[:at], parent, self._epoch)
        upper.lock_ref = lower.lock_ref
        parent.children[self._page_key(lower.key)] = upper
        lower.key, lower.value, lower.parent = lower.key[at:], lower.value[at:], upper
        upper.children[self._page_key(lower.key)] = lower
        self._probe.emit(NodeSplit(len(upper), len(lower)))
        return upper

    # -- growing ----------------------------------------------------------------------------------------------------

    def insert(self, tokens: Sequence[int], slots: NDArray[np.int64], namespace: str | None = None) -> int:
        """Store whole pages of `tokens` with their slots; returns how many tokens were there already.

        Slots of that part are not adopted: the caller frees them. The others are copied and now the tree's.
        """
        return self._insert(np.asarray(tokens, np.int64)[: self.floor(len(tokens))], slots, namespace)[0]

    def _insert(
        self, key: NDArray[np.int64], slots: NDArray[np.int64], namespace: str | None
    ) -> tuple[int, list[Node]]:
        path = self._walk(key, namespace)
        present = sum(map(len, path))
        if present < len(key):
            parent = path[-1] if path else self._root(namespace)
            leaf = Node(key[present:].copy(), slots[present : len(key)].copy(), parent, self._epoch)
            leaf.used = self._clock
            parent.children[self._page_key(leaf.key)] = leaf
            self._evictable += len(leaf)
            self._offer(leaf)
            path.append(leaf)
        return present, path

    def cache_finished_req(self, req: Req, *, is_insert: bool, kv_len_to_handle: int) -> ReleasedParts:
        end = kv_len_to_handle
        slots = self.row_slots(req, end)
        protected = req.kv.cache_protected_len
        whole = self.floor(end)
        if is_insert:
            key = np.asarray(req.tokens[:whole], np.int64)
            present, _ = self._insert(key, slots[:whole], req.namespace)
            self._slots.free_segments([(slots[protected:present], protected), (slots[whole:], whole)])
            parts = ReleasedParts(whole - present, present - protected, self.ceil(end) - whole)
        else:
            self._slots.free_segment(slots[protected:], protected)
            parts = ReleasedParts(0, 0, self.ceil(end) - protected)
        self.dec_lock_ref(req.last_node)
        req.last_node = None
        return parts

    def cache_unfinished_req(self, req: Req) -> None:
        end = req.kv.kv_committed_len
        slots = self.row_slots(req, end)
        protected = req.kv.cache_protected_len
        whole = self.floor(end)
        key = np.asarray(req.tokens[:whole], np.int64)
        present, path = self._insert(key, slots[:whole], req.namespace)
        if present > protected:
            self._slots.free_segment(slots[protected:present], protected)
            slots[:whole] = np.concatenate([node.value for node in path])
            self._rows.write(req.kv.held_row, protected, slots[protected:whole])
        node = path[-1] if path else None
        self.inc_lock_ref(node)  # the new path first: nothing may be evicted in between
        self.dec_lock_ref(req.last_node)
        req.last_node = node
        req.kv.cache_protected_len = whole
        req.prefix_indices = slots

    # -- pinning ----------------------------------------------------------------------------------------------------

    def inc_lock_ref(self, node: Any) -> None:
        for step in _up(node):
            if step.lock_ref == 0:
                self._evictable -= len(step)
                self._protected += len(step)
            step.lock_ref += 1

    def dec_lock_ref(self, node: Any) -> None:
        if node is None:
            return
        if not self._contracts.require(
            CHECKS.locks_balance,
            node.epoch == self._epoch and node.lock_ref > 0,
            hint="the node is not locked, or of a tree that was reset; it stays as it is",
            facts={"lock_ref": node.lock_ref, "tree": node.epoch, "current_tree": self._epoch},
        ):
            return
        for step in _up(node):
            step.lock_ref -= 1
            if step.lock_ref == 0:
                self._evictable += len(step)
                self._protected -= len(step)
                self._offer(step)

    # -- shrinking --------------------------------------------------------------------------------------------------

    def evict(self, tokens: int) -> int:
        freed = 0
        while freed < tokens and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.is_evictable_leaf:
                continue
            if node.used != used:
                self._offer(node)
                continue
            self._remove(node)
            freed += len(node)
        if tokens > 0:
            self._probe.emit(Evicted(tokens, freed))
        return freed

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._page_key(leaf.key)]
        leaf.parent = None
        self._evictable -= len(leaf)
        self._slots.free_segment(leaf.value, 0)
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        if node.is_evictable_leaf and not node.queued:
            node.queued = True
            self._entries += 1
            heapq.heappush(self._heap, (node.used, self._entries, node))

    # -- looking ----------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def tree_slots(self) -> NDArray[np.int64]:
        values = [node.value for node in self.nodes()]
        return np.concatenate(values) if values else np.empty(0, np.int64)


def _up(node: Node | None) -> Iterator[Node]:
    """From `node` to just below the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
