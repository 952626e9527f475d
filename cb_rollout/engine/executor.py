"""Run one step: a scheduled forward, and a token for each sequence that it completes.

Owns the recovery from a forward that fails, and the decode step that runs ahead of its results.
Called by the thread that steps the engine. B: rows of a forward, V: vocabulary.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, PendingStep
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import is_out_of_memory, out_of_memory
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Prefill, Request, members
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.errors import RolloutError, error_text
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import RequestStatus

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class StepExecutor:
    """Run prefill and decode steps for an engine's whole life."""

    runner: ModelRunner
    scheduler: Scheduler
    storage: CacheStorage
    token_sampler: TokenSampler
    counters: EngineCounters
    looks_ahead: bool = False
    """True: launch a graph before the last one's results."""
    graphs: GraphedDecoding | None = field(default=None, init=False)
    stream: torch.cuda.Stream | None = field(default=None, init=False)
    """All work is launched there; None: on the stream of the thread that steps."""
    _pending: PendingStep | None = field(default=None, init=False)
    _end: torch.cuda.Event | None = field(default=None, init=False)

    def reset(self, graphs: GraphedDecoding | None) -> None:
        """Discard the state of the last step; without `graphs` the runner runs decode steps."""
        self.graphs = graphs
        self.token_sampler.forget_rows()
        self._forget_pending()

    def run(self) -> list[Request] | None:
        """Run a forward, of prompts or of running sequences; None: neither can run."""
        # The last forward may have run in another thread, and in that thread's stream.
        devices.wait_event(self._end, self.runner.device)
        turns = [self.decode, self.prefill]
        if self.scheduler.is_prefill_next:
            turns.reverse()
        for run in turns:
            if (touched := run()) is not None:
                is_decode, scheduler = run == self.decode, self.scheduler
                scheduler.num_decodes_in_a_row = (scheduler.num_decodes_in_a_row + 1) * is_decode
                self._end = devices.record_event(self.runner.device)
                return touched
        return None

    def settle(self) -> None:
        """Give up the pending step, and return when the device has finished the engine's work."""
        self._forget_pending()
        devices.finish(self.runner.device, self.stream)

    def fail(self, requests: list[Request], error: Exception) -> list[Request]:
        name = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
        for request in requests:
            request.fail(f"{name}{error}", error)
            self.scheduler.retire(request)
        self.counters.requests_finished += len(requests)
        return requests

    def prefill(self) -> list[Request] | None:
        while prefills := self.scheduler.schedule_prefill():
            try:
                return self._run_prefill(prefills)
            except Exception as error:
                if self.runner.is_split or not is_out_of_memory(error):
                    raise
                devices.empty_cache(self.runner.device)
                self.scheduler.preempt(members(prefills))
                if not self.scheduler.narrow_prefill():
                    return self.fail([prefills[0].leader], out_of_memory(error))
        return None

    def _run_prefill(self, prefills: list[Prefill]) -> list[Request]:
        if self.graphs is not None:
            # Table rows may get other sequences, so no graph continues from the last one's buffers.
            self.graphs.forget_rows()
        self.storage.table.write(
            [
                (request.table_row, index, block)
                for request in self.scheduler.take_admitted()
                for index, block in enumerate(request.block_ids)
            ]
        )
        ends = [p.leader.num_computed + p.num_scheduled for p in prefills]
        logits_BV, computed, failed = self._forward([prefill.leader for prefill in prefills], ends)
        prefills = [prefills[row] for row in computed]
        self.counters.prefill_forwards += 1
        self.counters.prefill_tokens += sum(prefill.num_scheduled for prefill in prefills)
        pictures = [(p.leader.images, p.leader.num_computed) for p in prefills]
        self.counters.images_encoded += sum(len(i.after(start)) for i, start in pictures if i)
        rows, requests = self._fork(prefills)
        if requests:
            logits_BV = logits_BV.index_select(0, devices.to_device(rows, self.runner.device))
            self._sample(logits_BV, requests, is_recurring=False)
            now = time.perf_counter()
            for request in requests:
                request.first_token_time = request.first_token_time or now
        return failed + requests

    def _fork(self, prefills: list[Prefill]) -> tuple[list[int], list[Request]]:
        """Complete the computed prompts; return the logits row of each sequence to sample."""
        rows: list[int] = []
        requests: list[Request] = []
        for row, prefill in enumerate(prefills):
            self.storage.cache.copy_blocks(*self.scheduler.complete_prefill(prefill))
            if prefill.leader.status is RequestStatus.DECODING:
                targets = [follower.table_row for follower in prefill.followers]
                sources = [prefill.leader.table_row] * len(targets)
                self.storage.cache.copy_states(sources, targets)
                group = members([prefill])
                rows += [row] * len(group)
                requests += group
        return rows, requests

    def decode(self) -> list[Request] | None:
        while self.scheduler.running:
            try:
                return self._run_decode()
            except Exception as error:
                self.settle()
                is_memory = is_out_of_memory(error)
                if self.runner.is_split or (not is_memory and self._can_repeat):
                    raise
                devices.empty_cache(self.runner.device)
                if not self.scheduler.narrow_decode():
                    cause = out_of_memory(error) if is_memory else error
                    return self.fail(self.scheduler.running[:1], cause)
        return None

    def _run_decode(self) -> list[Request]:
        if (collected := self._collect_pending()) is not None:
            self._count(*collected)
            return collected[0]
        extended = self.scheduler.schedule_decode()
        running = list(self.scheduler.running)
        if not running:
            return []
        self.storage.table.write(extended)
        lengths = [request.num_tokens for request in running]
        graphs = self.graphs if self._can_replay(running) else None
        if graphs is not None and graphs.can_sample(running):
            if not graphs.follows(running, lengths):
                graphs.load(ForwardBatch.of(running, lengths, *self._pages), running)
            step = graphs.launch(running, lengths, *self._pages)
            self._count(running, self._finish(step, running))
            return running
        survivors, failed = running, []
        if graphs is not None:
            logits_BV = graphs.logits(ForwardBatch.of(running, lengths, *self._pages))
        else:
            logits_BV, rows, failed = self._forward(running, lengths)
            survivors = [running[row] for row in rows]
        if survivors:
            self._sample(logits_BV, survivors, is_recurring=True)
        # A step without memory to sample runs again, or its sequences are preempted.
        self.scheduler.complete_decode(survivors)
        return failed + survivors

    def _forward(
        self, requests: list[Request], ends: list[int]
    ) -> tuple[torch.Tensor, list[int], list[Request]]:
        """Compute each sequence's tokens up to `ends` that are not computed yet.

        Returns as `run_isolated`, but the sequences that raised, ended. Raises if the model runs
        nothing at all any more, or memory ran out.
        """

        def forward(rows: Sequence[int]) -> torch.Tensor:
            chosen, lengths = [requests[row] for row in rows], [ends[row] for row in rows]
            if prompts := [(r.prompt_ids, r.images) for r in chosen if r.images is not None]:
                self.runner.image_inputs.find_positions(prompts)
            routes = [self._known_routes(request) for request in chosen]
            return self.runner.logits(ForwardBatch.of(chosen, lengths, *self._pages, routes))

        rows = range(len(requests))
        has_history = any(request.num_computed for request in requests)
        # Other processes would wait in a forward that raises here and is run again.
        if self.runner.is_split or (has_history and not self._can_repeat):
            return forward(rows), list(rows), []
        logits_BV, computed, failures = run_isolated(forward, len(rows))
        if failures and not computed and not self.runner.is_sound():
            raise failures[0][1]
        for row, error in failures:
            self.fail([requests[row]], error)
        return logits_BV, computed, [requests[row] for row, _ in failures]

    @property
    def _pages(self) -> tuple[PagedCache, BlockTable]:
        return self.storage.cache, self.storage.table

    def _known_routes(self, request: Request) -> Any:
        """Return the experts that its next tokens took before they lost their blocks."""
        routes = request.routed_experts
        if routes is None or request.num_computed >= len(routes):
            return None
        if request.policy_starts[-1][0] != self._version:
            # Another sequence would choose its experts by the new policy.
            request.has_old_keys = True
        return routes[request.num_computed :]

    @property
    def _can_repeat(self) -> bool:
        """Return whether a decode that raised can run again: no row's recurrent state has moved on.

        Rows that are not padded run in several forwards, and a GPU stores states layer by layer.
        """
        layout, backend = self.storage.cache.layout, self.runner.attention_backend
        is_stored_once = self.runner.batch_layout.takes_any_lengths
        is_stored_once &= backend is None or backend.saves_at_end
        return is_stored_once or not layout.is_recurrent

    @property
    def _version(self) -> int:
        return self.scheduler.blocks.policy_version

    def _sample(
        self, logits_BV: torch.Tensor, requests: list[Request], *, is_recurring: bool
    ) -> None:
        extend, version = self.token_sampler.extend, self._version
        self._count(requests, extend(requests, logits_BV, version, is_recurring=is_recurring))

    def _count(self, requests: list[Request], num_given: int) -> None:
        decoding = RequestStatus.DECODING
        ended = [r for r in requests if r.status is not decoding and r.status.is_final]
        self.counters.tokens_generated += num_given
        self.counters.requests_finished += len(ended)
        peak, num_used = self.counters.kv_blocks_peak, self.scheduler.pool.num_used
        self.counters.kv_blocks_peak = max(peak, num_used)

    # CUDA graphs. A step leaves the next one's inputs on the device, so the next step is launched
    # before this one's tokens are read. A sequence that turns out to have ended has one row too
    # many, whose token is dropped.

    def _can_replay(self, running: list[Request]) -> bool:
        if self.graphs is None or not self.graphs.can_run(len(running)):
            return False
        # A graph takes one set of rotary factors for all rows: that of the newest positions.
        limits = self.scheduler.limits.rope_limits
        return not limits or len({request.rope_side for request in running}) == 1

    def _collect_pending(self) -> tuple[list[Request], int] | None:
        """Return the pending step's sequences that still run, and how many of them got a token."""
        step, self._pending = self._pending, None
        current = [] if step is None else step.running
        return (current, self._finish(step, current)) if step is not None and current else None

    def _finish(self, step: PendingStep, current: list[Request]) -> int:
        assert self.graphs is not None
        try:
            self._pending = self._launch_next(current)
        except Exception as error:  # noqa: BLE001  a step that is needed will fail again
            _LOGGER.debug("a step waits for the last one's tokens: %s", error_text(error))
            self.graphs.forget_rows()
        results = step.read(current)
        num_given = self.token_sampler.append(current, results, self._version)
        self.scheduler.complete_decode(current)
        return num_given

    def _launch_next(self, current: list[Request]) -> PendingStep | None:
        """Launch the step after one whose tokens are not read yet; None: it has to wait for them.

        A sequence joined, a smaller graph fits, a sequence's keys change, its blocks would take a
        preemption, or the step moves recurrent states.
        """
        if not self.looks_ahead or self.graphs is None or not self.graphs.can_look_ahead:
            return None
        # Without properties: this runs for every row of every step.
        going = [r for r in current if len(r.token_ids) - len(r.prompt_ids) + 1 < r.max_new_tokens]
        lengths = [len(request.token_ids) + 1 for request in going]
        if not going or not self.graphs.follows(going, lengths):
            return None
        limits = self.scheduler.limits
        if limits.rope_limits and any(
            limits.rope_side(length) != request.rope_side
            for request, length in zip(going, lengths, strict=True)
        ):
            return None
        extended = self.scheduler.blocks.extend_ahead(going)
        if extended is None:
            return None
        self.storage.table.write(extended)
        return self.graphs.launch(going, lengths, *self._pages)

    def _forget_pending(self) -> None:
        self._pending = None
        if self.graphs is not None:
            self.graphs.forget_rows()


def run_isolated(
    forward: Callable[[Sequence[int]], torch.Tensor], num_rows: int
) -> tuple[torch.Tensor, list[int], list[tuple[int, Exception]]]:
    """Run a forward over rows `0 .. num_rows - 1`; where it raises, find the rows at fault.

    Halves are tried until the bad rows are alone. A `forward` that raises must leave the cache
    unchanged, or overwrite it when it runs again. An out-of-memory error is raised.

    Returns float32 logits `[rows, V]` of the rows that ran, these rows, and each bad row's error.
    """
    parts: list[torch.Tensor] = []
    computed: list[int] = []
    failures: list[tuple[int, Exception]] = []
    pending: list[Sequence[int]] = [range(num_rows)]
    while pending:
        rows = pending.pop()
        try:
            parts.append(forward(rows))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(rows) == 1:
                failures.append((rows[0], error))
            else:
                middle = len(rows) // 2
                pending += [rows[middle:], rows[:middle]]
        else:
            computed.extend(rows)
    logits_BV = parts[0] if len(parts) == 1 else torch.cat(parts or [torch.empty(0)])
    return logits_BV, computed, failures
