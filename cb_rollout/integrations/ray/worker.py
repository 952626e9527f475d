"""Sample sequences in a worker's process, and report the finished ones.

Owns one engine and its copy of the weights, or a shard of both. Does not choose sequences and does
not import Ray. Any thread of the worker's process may call any method, but only one at a time calls
`report`. A worker that is split over processes has a shard in each. All shards get the same
submissions and updates in the same order, and the first shard reports.
"""

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import distributed

from cb_rollout.compat.torch import release_workers
from cb_rollout.config.enums import InFlight, WeightSync
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.service.input_processor import ServingLimits
from cb_rollout.engine.service.output_queue import OutputQueue, OutputSink
from cb_rollout.errors import EngineDeadError
from cb_rollout.integrations.ray.weight_update import (
    AdapterBase,
    WeightUpdate,
    WorkerTensor,
    adapter_base,
    counterparts,
    worker_tensors,
    write_weights,
)
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.rollout.checkpoint import load_model
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.prompts import SpecialTokens, special_tokens_of
from cb_rollout.types import GenerationOutput
from cb_rollout.weights.adapters import with_adapters

# Sequences that end within this time of each other are reported together: a report takes
# milliseconds from the thread that computes, and from every core on a CPU.
REPORT_GAP_SECONDS = 0.1

# A worker gets this many times the sequences that run together; the others wait in its queue.
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
    """Number shared by the sequences of one prompt."""
    records_timestamps: bool
    images: PromptImages | None = None
    """Images of the prompt, one object for its group; None: it has none."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """Limits of a worker's engine, and the tensors that an update sends."""

    limits: ServingLimits
    """The limits at the time of this description; their functions return constants."""
    defaults: SamplingParams
    """Sampling parameters of the model's generation config."""
    capacity: int
    """Number of sequences, running and waiting, that keep the worker busy."""
    tensors: tuple[WorkerTensor, ...]
    base: AdapterBase | None
    """The frozen base if updates send only adapters; None: they send all weights."""
    routers: Routers | None
    """The routers whose choices are recorded; None: `router_replay` is off."""
    process_id: int
    generation_config: Any = None
    """The checkpoint's generation config; None: it has none."""
    special_tokens: SpecialTokens | None = None
    """Special tokens from the model's config, whose class the pool's process may lack."""
    config: RolloutConfig | None = None
    """Settings of the worker's engine; some may come from the generation config."""


class _NoOutputs(OutputSink):
    """Drop a shard's outputs, which the first shard reports."""

    def put(self, output: GenerationOutput) -> None: ...

    def close(self, error: EngineDeadError) -> None: ...


class PoolWorker:
    """An engine that samples items and takes weights."""

    def __init__(
        self,
        model_name_or_path: str,
        config: RolloutConfig,
        tokenizer: Any,
        peft_config: Any = None,
    ) -> None:
        """Load the checkpoint onto this process's device, and start the engine.

        If the config splits a worker, each process of torch.distributed's group loads a shard. With
        a `peft_config`, the model gets adapters that run unmerged, and updates send only these.

        Raises:
            ConfigurationError: the model or a setting is refused.
        """
        size = config.tensor_parallel_size
        model: Any = load_model(model_name_or_path, config.rollout_dtype, tensor_parallel_size=size)
        model.requires_grad_(False)
        self._base: AdapterBase | None = None
        module = ModelFacts.of(model).module
        if peft_config is not None:
            model = with_adapters(model, peft_config).eval()
            self._base = adapter_base(module)
        self._tensors = worker_tensors(module, merges_adapters=peft_config is None)
        model.requires_grad_(False)
        # The pool bounds the load.
        engine_config = replace(
            config, weight_sync=WeightSync.SHARED, max_queue_size=0, tensor_parallel_size=1
        )
        self._max_items = config.max_queue_size
        self._generator = RolloutGenerator(model, engine_config, tokenizer=tokenizer)
        self._special_tokens = special_tokens_of(module.config)
        self._manager = self._generator.manager
        self._outputs = OutputQueue()
        is_first = size == 1 or distributed.get_rank() == 0
        self._sink: OutputSink = self._outputs if is_first else _NoOutputs()
        self._lock = threading.Lock()
        self._running: set[str] = set()
        # Cancelled before they arrived: calls of one worker run on several threads.
        self._cancelled: set[str] = set()
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
                # A sync sends the weights of the active adapters alone.
                adapters=tuple,
            ),
            defaults=self._manager.defaults,
            capacity=min(capacity, self._max_items or capacity),
            tensors=self._tensors,
            base=self._base,
            routers=self._manager.routers,
            process_id=os.getpid(),
            generation_config=self._manager.generation_config,
            special_tokens=self._special_tokens,
            config=self._manager.config,
        )

    def submit(self, items: Sequence[WorkItem]) -> None:
        """Queue items; equal groups are prefilled once.

        Raises:
            ConfigurationError: the model cannot run prompts with images.
        """
        requests = []
        for item in items:
            (request,) = self._manager.create_requests(
                [item.prompt_ids],
                [item.params],
                request_id=item.item_id,
                records_timestamps=item.records_timestamps,
                keeps_refused=True,
            )
            request.seed = item.seed
            request.group = item.group
            request.images = item.images
            if request.status.is_final:
                self._sink.put(request.output())
                continue
            requests.append(request)
        self._manager.check_images(requests)
        with self._lock:
            self._running.update(request.request_id for request in requests)
            self._manager.submit(requests, self._sink)
            self._manager.cancel_requests(list(self._cancelled & self._running))
            self._cancelled -= self._running

    def cancel(self, item_ids: Sequence[str]) -> None:
        """End items early; each still delivers its tokens."""
        with self._lock:
            self._cancelled |= set(item_ids) - self._running
            self._manager.cancel_requests(item_ids)

    def report(self, seconds: float) -> tuple[list[GenerationOutput], EngineCounters]:
        """Wait at most `seconds` for an item to end; return all ended items, and the totals so far.

        An output's `request_id` is the item's id, and its times are seconds since the item arrived.
        In the totals, `kv_blocks_peak` is 0. `EngineDeadError`: the engine stopped on an exception.
        """
        outputs = []
        output = self._outputs.take(timeout=seconds)
        end = time.monotonic() + REPORT_GAP_SECONDS
        while output is not None:
            outputs.append(output)
            timeout = 0.0
            if len(self._running) > len(outputs):
                timeout = max(0.0, end - time.monotonic())
            output = self._outputs.take(timeout=timeout)
        self._manager.loop.require_alive()
        with self._lock:
            self._running.difference_update(output.request_id for output in outputs)
        counters = replace(self._manager.counters, kv_blocks_peak=0)
        return [_without_clock(output) for output in outputs], counters

    def update(
        self,
        update: WeightUpdate,
        arrays: Sequence[np.ndarray],
        in_flight: InFlight,
        *,
        are_deltas: bool = False,
    ) -> None:
        """Write new weights between two forwards, and stamp later tokens with their version.

        If a write raises, the process ends, so that no token is sampled from partly updated
        weights.

        Raises:
            WeightSyncError: the weights are those of another model; nothing is written.
        """
        tensors = counterparts(update, self._manager.model)
        with self._manager.paused(in_flight.value):
            try:
                write_weights(update, arrays, tensors, are_deltas=are_deltas)
                self._manager.loop.begin_policy_version(in_flight, update.version)
            except BaseException:  # noqa: BLE001  the process ends
                os._exit(1)

    def close(self) -> None:
        self._generator.close()


def _without_clock(output: GenerationOutput) -> GenerationOutput:
    """Return an output with times relative to its arrival, since machines' clocks differ.

    Images are left out, because the pool has them.
    """
    began = output.created_time
    admitted, ended = output.lifespan
    timestamps = None
    if output.timestamps is not None:
        timestamps = [moment - began for moment in output.timestamps]
    return replace(
        output,
        created_time=0.0,
        lifespan=(admitted - began, ended - began),
        timestamps=timestamps,
        images=None,
    )
