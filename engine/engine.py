"""The engine: a model, its KV memory and a scheduler, with a thread of its own when it serves."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from kvlens import KvlensError
from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.memory import KvMemory, build_memory
from kvlens.engine.model.config import ModelConfig, resolve_model
from kvlens.engine.model.load import load_model
from kvlens.engine.model.runner import ModelRunner
from kvlens.engine.model.tokenizer import Tokenizer
from kvlens.engine.pools.kv import MHATokenToKVPool
from kvlens.engine.probe import NullProbe
from kvlens.engine.record import FinishReason, Req, SamplingParams
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Output, Scheduler

if TYPE_CHECKING:
    from kvlens.engine.model.forward import Runner
    from kvlens.engine.probe import Probe

T = TypeVar("T")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEARTBEAT_SECONDS = 1.0


class ConfigError(KvlensError):
    """A setting that cannot be; the message names it."""


class RequestRejected(KvlensError):
    """A request that is not taken; nothing was changed. `status` is an HTTP status, `code` a word for programs."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine."""

    model: str = "builtin"
    """`builtin`, or a checkpoint directory."""
    page_size: int = 1
    """Slots per page."""
    pool_slots: int = 8192
    """Tokens of KV, rounded down to whole pages."""
    max_running: int = 64
    """Requests in one batch; rows."""
    max_queued: int = 2048
    """Requests that may wait; more are refused."""
    context_length: int | None = None
    """Tokens of prompt and answer; None: the model's own."""
    chunked_prefill_size: int = 512
    """Prompt tokens per step."""
    cache: str = "radix"
    """Prefix cache: radix or chunk."""
    contracts: str = "report"
    """What a failing check does: report or strict."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto: float32 on a CPU, else the checkpoint's."""
    device: str = "auto"
    """A torch device; auto: cuda when there is one."""
    threads: int | None = None
    """CPU threads; None: by the size of the model."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A config made definite: what it takes to build the engine, known before anything is allocated."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    context_length: int
    pool_slots: int

    @classmethod
    def make(cls, config: EngineConfig) -> EnginePlan:
        """Raises ConfigError and ModelError."""
        _check(config)
        directory = resolve_model(config.model)
        model = ModelConfig.load(directory)
        device = _device(config.device)
        context = config.context_length or model.context_length
        if context > model.context_length:
            raise ConfigError(
                f"--context-length {context:,} is more than the {model.context_length:,} tokens of {config.model}"
            )
        name = config.dtype if config.dtype != "auto" else "float32" if device.type == "cpu" else model.dtype
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name} is not served: choose {', '.join(DTYPES)} or auto")
        slots = config.pool_slots // config.page_size * config.page_size
        return cls(config, directory, model, DTYPES[name], device, context, slots)

    @property
    def threads(self) -> int:
        """CPU threads for PyTorch. A small model is faster on one: others wait longer for each other than they help."""
        parameters = 12 * self.model.layers * self.model.hidden_size**2
        return self.config.threads or max(1, min(torch.get_num_threads(), parameters // 50_000_000))

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * self.dtype.itemsize


class Engine:
    """Serves one model.

    `submit` and `abort` may be called from any thread. Either the owner calls `step`, or `start` gives the engine a
    thread that does; then outputs arrive through the callback, once per step.
    """

    def __init__(self, plan: EnginePlan | EngineConfig, *, probe: Probe | None = None, runner: Runner | None = None):
        self.plan = plan if isinstance(plan, EnginePlan) else EnginePlan.make(plan)
        self.config = self.plan.config
        self.probe: Probe = probe or NullProbe()
        self.tokenizer = Tokenizer(self.plan.directory)
        self.failure: str | None = None
        """Why the engine stopped for good, if it did."""
        self.memory = self._build_memory()
        self.scheduler = Scheduler(
            self.memory,
            runner or self._build_runner(),
            Limits(self.config.max_running, max(self.config.chunked_prefill_size, self.config.page_size)),
            FinishRules(self.tokenizer, self.tokenizer.eos_ids),
            bytes_per_slot=self.plan.bytes_per_slot,
            between=self._drain,
        )
        self._numbers = itertools.count(1)
        self._ids: set[str] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def max_total_tokens(self) -> int:
        """Prompt and answer of one request, together, at most."""
        # The last token is sampled, never computed: it needs no slot.
        return min(self.plan.context_length, self.plan.pool_slots + 1)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(
        self, rid: str, prompt_ids: Sequence[int], sampling: SamplingParams, trace: str | None = None
    ) -> SamplingParams:
        """Queue a request; returns its parameters with `max_new_tokens` cut to what fits behind the prompt.

        Raises RequestRejected, before anything was changed, when it can never run, its id is in use, or the queue is
        full.
        """
        self._check_request(rid, prompt_ids, sampling)
        most = self.max_total_tokens - len(prompt_ids)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, most))
        req = Req(next(self._numbers), rid, list(prompt_ids), sampling, trace)
        self._ids.add(rid)
        self.post(lambda: self.scheduler.add(req))
        return sampling

    def _check_request(self, rid: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        length, limit, page = len(prompt_ids), self.max_total_tokens, self.config.page_size
        if self.failure is not None:
            raise RequestRejected(f"the engine stopped: {self.failure}; restart it", 503, "engine_stopped")
        if not length:
            raise RequestRejected("the prompt has no tokens: send at least one", code="empty_prompt")
        if length >= self.plan.context_length:  # first: a larger pool would not help it
            raise RequestRejected(
                f"prompt has {length:,} tokens, the context is {self.plan.context_length:,} with at least one for the "
                f"answer: shorten it to {limit - 1:,}",
                code="context_length_exceeded",
            )
        if length > self.plan.pool_slots:
            raise RequestRejected(
                f"prompt has {length:,} tokens, the pool holds {self.plan.pool_slots:,}: shorten it, or start with "
                f"--pool-slots {-(-length // page) * page}",
                code="context_length_exceeded",
            )
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.plan.model.vocab_size:
            raise RequestRejected(
                f"prompt has ids outside 0..{self.plan.model.vocab_size - 1:,}: send ids of this model's tokenizer",
                code="invalid_token",
            )
        if sampling.max_new_tokens < 1:
            raise RequestRejected(f"max_tokens is {sampling.max_new_tokens}: ask for at least 1")
        if rid in self._ids:
            raise RequestRejected(f"a request with id {rid} is running: choose another id", code="duplicate_id")
        if len(self._ids) >= self.config.max_running + self.config.max_queued:
            raise RequestRejected(
                f"{len(self._ids):,} requests are here, {self.config.max_queued:,} may wait: try again later, or start "
                "with a higher --max-queued",
                503,
                "queue_full",
            )

    def abort(self, rid: str | None = None, message: str = "aborted on request") -> Future[int]:
        """End one request, or with None every one; resolves to how many were found."""
        return self.post(lambda: self.scheduler.abort(rid, message))

    def flush(self) -> Future[bool]:
        """Empty the cache; resolves to False, with nothing changed, while requests are here."""
        return self.post(self.scheduler.flush)

    def post(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the scheduler's thread, between two steps or while a step's results are not applied yet."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has gone
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    # -- running ----------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and self._inbox.empty()

    def step(self) -> list[Output]:
        """Take what was posted, then compute one batch."""
        self._drain()
        return self._told(self.scheduler.step())

    def _told(self, outputs: list[Output]) -> list[Output]:
        """The ids of those that ended may be used again."""
        self._ids.difference_update(output.rid for output in outputs if output.finish is not None)
        return outputs

    def start(self, on_outputs: Callable[[list[Output]], None]) -> None:
        """Give the engine a thread; `on_outputs` is called there, once per step that brought something."""
        self._thread = threading.Thread(target=self._serve, args=(on_outputs,), name="scheduler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End every request, then the thread; nothing is held afterwards."""
        if self._thread is not None and self._thread.is_alive():
            self.abort(message="the engine is shutting down")
            self._stopping = True
            self._inbox.put(lambda: None)
            self._thread.join()
        self.probe.close()

    def _drain(self) -> None:
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _serve(self, on_outputs: Callable[[list[Output]], None]) -> None:
        while not (self._stopping and self.is_idle):
            try:
                if self.is_idle:
                    self._wait()
                elif outputs := self.step() if self.failure is None else self._refuse():
                    on_outputs(outputs)
            except Exception as error:
                self._fail(error)

    def _wait(self) -> None:
        """Sleep until something is posted, with a heartbeat each second."""
        try:
            self.scheduler.idle()
        except Exception:
            if self.failure is None:
                raise
        deadline = time.monotonic() + HEARTBEAT_SECONDS
        while self.is_idle and not self._stopping and (left := deadline - time.monotonic()) > 0:
            try:
                self._inbox.get(timeout=left)()
            except queue.Empty:
                return

    def _fail(self, error: Exception) -> None:
        """The scheduler broke. It computes nothing more and nobody new is let in, but its thread still answers."""
        traceback.print_exception(error)
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"

    def _refuse(self) -> list[Output]:
        """Take what was posted, and end everybody: nobody may wait for an engine that stopped."""
        self._drain()
        return self._told(
            self.scheduler.end_all(FinishReason("abort", message=f"the engine stopped: {self.failure}", status=500))
        )

    # -- building ---------------------------------------------------------------------------------------------------

    def _build_memory(self) -> KvMemory:
        return build_memory(
            rows=self.config.max_running,
            width=self.plan.context_length,
            slots=self.plan.pool_slots,
            page_size=self.config.page_size,
            cache=self.config.cache,
            contracts=Contracts(Mode(self.config.contracts), self.probe, lambda: self.scheduler.steps),
            probe=self.probe,
            step=lambda: self.scheduler.steps,
        )

    def _build_runner(self) -> ModelRunner:
        plan = self.plan
        pool = MHATokenToKVPool(
            plan.pool_slots,
            plan.config.page_size,
            layers=plan.model.layers,
            kv_heads=plan.model.kv_heads,
            head_dim=plan.model.head_dim,
            dtype=plan.dtype,
            device=plan.device,
        )
        return ModelRunner(load_model(plan.directory, plan.dtype, plan.device), pool, self.memory.rows)


def _check(config: EngineConfig) -> None:
    for name in ("page_size", "pool_slots", "max_running", "max_queued", "chunked_prefill_size"):
        if getattr(config, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(config, name)}: give at least 1")
    if config.pool_slots < config.page_size:
        raise ConfigError(f"--pool-slots {config.pool_slots} holds no page of --page-size {config.page_size}")
    if config.cache not in ("radix", "chunk"):
        raise ConfigError(f"--cache {config.cache} does not exist: choose radix or chunk")
    if config.contracts not in {mode.value for mode in Mode}:
        raise ConfigError(f"--contracts {config.contracts} does not exist: choose report or strict")
    if config.context_length is not None and config.context_length < 2:
        raise ConfigError(f"--context-length is {config.context_length}: give at least 2, a prompt and an answer")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is no device: choose cpu, cuda or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {name} is not there: this PyTorch sees no CUDA device, choose cpu")
    return device
