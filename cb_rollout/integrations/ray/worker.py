"""Sample sequences in a worker's process, and report what they have so far.

Owns one engine and its copy of the weights. Chooses no sequence and imports no Ray. Each method is
called from any thread of the worker's process; `report` by one at a time.
"""

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cb_rollout.compat.torch import release_workers
from cb_rollout.config.enums import InFlight, RolloutDtype, SamplingMaskMode, WeightSync
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import ServingLimits
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import WeightSyncError
from cb_rollout.integrations.ray.weight_update import (
    Buffer,
    WeightUpdate,
    WorkerTensor,
    require_counterparts,
    require_whole,
    worker_tensors,
    write_weights,
)
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.types import GenerationOutput
from cb_rollout.weights.replica import tensors_by_name

# Sequences that end within this time of each other are reported together: a report takes
# milliseconds from the thread that computes, and from every core on a CPU.
REPORT_GAP_SECONDS = 0.1

# Between two reports of the tokens of running sequences.
PROGRESS_REPORT_SECONDS = 0.25

# Sequences of a worker, in terms of those that run together: the next wait in its own queue.
WAITING_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A sequence to sample, as it travels to a worker."""

    item_id: str
    """Unique id of this attempt to sample it."""
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    group: int | None
    """Number that sequences of one prompt share."""
    records_timestamps: bool
    token_ids: list[int] = field(default_factory=list)
    """Tokens that an earlier worker sampled and reported."""
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemProgress:
    """Tokens that a running sequence got since the last report."""

    item_id: str
    start: int
    """Index of the first of them among the sampled tokens."""
    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[tuple[int, int]]
    """Runs of (version, number of tokens) of all tokens reported until now."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """State of a worker's sequences."""

    outputs: list[GenerationOutput]
    """Sequences that ended since the last report; `request_id` is the item's id, and times are
    seconds since the item arrived."""
    progress: list[ItemProgress]
    counters: EngineCounters
    """Totals since the worker started; the peak is left out."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Limits of a worker's engine, and the tensors of its model."""

    limits: ServingLimits
    """Those of now: what they return does not change."""
    defaults: SamplingParams
    """Sampling parameters of the model's generation config."""
    capacity: int
    """Sequences that it should hold, running and waiting."""
    tensors: tuple[WorkerTensor, ...]
    process_id: int


class PoolWorker:
    """An engine that samples items and takes weights."""

    def __init__(self, model_name_or_path: str, config: RolloutConfig, tokenizer: Any) -> None:
        """Load the checkpoint onto this process's device, and start the engine.

        Raises:
            ConfigurationError: the model or a setting is refused.
        """
        is_auto = config.rollout_dtype == RolloutDtype.AUTO
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_name_or_path, dtype="auto" if is_auto else getattr(torch, config.rollout_dtype)
        )
        if torch.cuda.is_available():
            model = model.to("cuda")
        model.eval().requires_grad_(False)
        # The pool counts its own load, which falls before the engine has ended what is cancelled.
        self._config = replace(config, weight_sync=WeightSync.SHARED, max_queue_size=0)
        self._max_items = config.max_queue_size
        self._generator = RolloutGenerator(model, self._config, tokenizer=tokenizer)
        self._manager = self._generator.manager
        self._outputs = OutputQueue()
        self._lock = threading.Lock()
        self._updating = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._num_reported: dict[str, int] = {}
        # Cancelled before they arrived: calls of one worker run on several threads.
        self._cancelled: set[str] = set()
        self._progress_reported = 0.0
        self._manager.is_served = True
        self._manager.start()
        # This thread computed; its OpenMP workers would compete with the engine's for the cores.
        release_workers()

    def description(self) -> WorkerDescription:
        limits = self._manager.limits
        capacity = math.ceil(self._manager.memory_plan.num_slots * WAITING_FACTOR)
        return WorkerDescription(
            limits=replace(
                limits,
                vocab_size=partial(int, limits.vocab_size()),
                max_cached_tokens=partial(int, limits.max_cached_tokens()),
            ),
            defaults=self._manager.defaults,
            capacity=min(capacity, self._max_items or capacity),
            tensors=worker_tensors(self._manager.model),
            process_id=os.getpid(),
        )

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Queue items; equal groups are prefilled once."""
        requests = []
        for item in items:
            (request,) = self._manager.create_requests(
                [item.prompt_ids],
                [item.params],
                request_id=item.item_id,
                records_timestamps=item.records_timestamps,
                keeps_refused=True,
            )
            request.seed, request.group = item.seed, item.group
            if request.status.is_final:
                self._outputs.put(request.output())
                continue
            request.resume_after(item.token_ids, item.logprobs, item.policy_versions)
            requests.append(request)
        with self._lock:
            requests = [r for r in requests if r.request_id not in self._cancelled]
            self._cancelled -= {item.item_id for item in items}
            self._requests |= {request.request_id: request for request in requests}
            self._num_reported |= {r.request_id: r.num_generated for r in requests}
            self._manager.submit(requests, self._outputs)

    def cancel(self, item_ids: Sequence[str]) -> None:
        with self._lock:
            self._cancelled |= set(item_ids) - self._requests.keys()
            for item_id in item_ids:
                self._requests.pop(item_id, None)
                self._num_reported.pop(item_id, None)
        self._manager.cancel_requests(item_ids)

    def report(self, seconds: float) -> WorkerReport:
        """Wait for an item to end, at most `seconds`, and report on all.

        Raises:
            EngineDeadError: the engine stopped on an exception.
        """
        outputs = []
        output = self._outputs.take(timeout=seconds)
        end = time.monotonic() + REPORT_GAP_SECONDS
        while output is not None:
            outputs.append(output)
            is_last = len(self._requests) <= len(outputs)
            output = self._outputs.take(timeout=0.0 if is_last else max(0, end - time.monotonic()))
        self._manager.loop.require_alive()
        with self._lock:
            ended = [self._ended(output) for output in outputs]
            progress = self._all_progress()
        return WorkerReport(ended, progress, replace(self._manager.counters, kv_blocks_peak=0))

    def update(self, update: WeightUpdate, buffers: Sequence[Buffer], in_flight: InFlight) -> None:
        """Write new weights between two forwards, and stamp later tokens with their version.

        All is checked before the first tensor is written. A write that raises nevertheless ends
        the process: no token is sampled from a mixture of weights.

        Raises:
            WeightSyncError: it is cut off, damaged, not newer or of another model; none is written.
        """
        with self._updating:
            version = self._manager.policy_version
            if update.version <= version:
                raise WeightSyncError(
                    f"weights of version {update.version} came to a worker that has version "
                    f"{version} already, so another trainer updates it too; give each trainer a "
                    "pool of its own."
                )
            require_whole(update, buffers)
            tensors = tensors_by_name(self._manager.model)
            require_counterparts(update, tensors)
            with self._manager.paused(in_flight.value):
                try:
                    write_weights(update, buffers, tensors)
                    self._manager.loop.begin_policy_version(in_flight, update.version)
                except BaseException:  # noqa: BLE001  the process ends
                    os._exit(1)

    def close(self) -> None:
        self._generator.close()

    def _ended(self, output: GenerationOutput) -> GenerationOutput:
        self._requests.pop(output.request_id, None)
        self._num_reported.pop(output.request_id, None)
        # Clocks of two machines have nothing in common.
        began, times = output.created_time, output.timestamps
        times = None if times is None else [moment - began for moment in times]
        return replace(output, created_time=0.0, timestamps=times)

    def _all_progress(self) -> list[ItemProgress]:
        if time.monotonic() - self._progress_reported < PROGRESS_REPORT_SECONDS:
            return []
        self._progress_reported = time.monotonic()
        return [made for request in self._requests.values() if (made := self._progress(request))]

    def _progress(self, request: Request) -> ItemProgress | None:
        """Return a running sequence's new tokens but the newest, which may be its last."""
        config = self._config
        # The thread that steps appends versions first, then tokens, then log-probabilities.
        start = self._num_reported[request.request_id]
        stop = len(request.logprobs) - 1
        starts = list(request.policy_starts)
        if stop <= start:
            return None
        self._num_reported[request.request_id] = stop
        # Tokens and log-probabilities are not all that its output holds.
        has_more = config.router_replay or config.sampling_mask == SamplingMaskMode.REPLAY
        if has_more or request.records_timestamps or request.params.top_logprobs:
            # Another worker would start it over; the report says only that it goes on.
            return ItemProgress(request.request_id, 0, [], [], [])
        first = len(request.prompt_ids)
        tokens, logprobs = request.token_ids[first + start : first + stop], request.logprobs
        runs = first_runs(starts, stop)
        return ItemProgress(request.request_id, start, tokens, logprobs[start:stop], runs)


def first_runs(starts: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """Return the runs (version, number of tokens) of the first tokens.

    Args:
        starts: (version, index of its first token) of each run.
        num_tokens: at most the tokens of all runs.
    """
    ends = [*(min(start, num_tokens) for _, start in starts[1:]), num_tokens]
    runs = zip(starts, ends, strict=True)
    return [(version, end - start) for (version, start), end in runs if end > start]
