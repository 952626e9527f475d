"""One step of the loop: a scheduled forward, and a token for each sequence that it completes.

Owns what happens where a forward fails. Made anew with each cache.
"""

import time
from collections.abc import Sequence

import torch

from cb_rollout.engine.cuda_graphs.steps import GraphedSteps
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import is_out_of_memory, out_of_memory
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.request import Prefill, Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.scheduler.faults import Outcome, run_isolated
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.engine.spec_decode.verify import DraftedSteps
from cb_rollout.errors import RolloutError
from cb_rollout.metrics.counters import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus

WORTHWHILE_SHARE, MOST_DECODES = 4, 8
# A prefill of few prompts costs as much as a decode step of many rows. So prompts wait until there
# is one for so many running sequences, or for so many decode steps.


class Steps:
    """Runs what the scheduler chose."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        storage: CacheStorage,
        token_sampler: TokenSampler,
        counters: EngineCounters,
        graphed: GraphedSteps | None = None,
        drafted: DraftedSteps | None = None,
    ) -> None:
        """Join the parts of one engine.

        Args:
            runner: runs forwards.
            scheduler: chooses what runs.
            storage: holds the cache.
            token_sampler: samples.
            counters: told what was done.
            graphed: runs decode steps, where a device can; None: the runner does.
            drafted: runs them with drafts, where few sequences run; None: nobody does.
        """
        self._graphed, self._drafted = graphed, drafted
        self.counters = counters
        self.device = runner.device
        self._runner, self._scheduler, self._storage = runner, scheduler, storage
        self._token_sampler = token_sampler
        self._num_decodes = 0
        self._end: torch.cuda.Event | None = None

    def run(self) -> list[Request] | None:
        """Run one forward, of prompts or of running sequences; None: neither can run."""
        # The last one may have run in another thread, and its stream.
        devices.wait_event(self._end, self.device)
        turns = [self.decode, self.prefill]
        if self._is_prefill_due:
            turns.reverse()
        for run in turns:
            if (touched := run()) is not None:
                self._num_decodes = self._num_decodes + 1 if run == self.decode else 0
                self._end = devices.record_event(self.device)
                return touched
        return None

    def settle(self) -> None:
        """Give up what was launched ahead, and return when the device is done with everything."""
        if self._graphed is not None:
            self._graphed.forget()
        devices.finish(self.device)

    @property
    def _is_prefill_due(self) -> bool:
        scheduler = self._scheduler
        if scheduler.limits.prefills_first or self._num_decodes >= MOST_DECODES:
            return True
        num_startable = min(len(scheduler.waiting), scheduler.max_seated - scheduler.num_seated)
        is_worthwhile = num_startable * WORTHWHILE_SHARE >= len(scheduler.running)
        return self._num_decodes > 0 and (is_worthwhile or bool(scheduler.prefilling))

    def prefill(self) -> list[Request] | None:
        """Run one forward of prompts; None: there is none to run."""
        while prefills := self._scheduler.schedule_prefill():
            try:
                return self._run_prefill(prefills)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                devices.empty_cache(self.device)
                groups = [m for prefill in prefills for m in (prefill.leader, *prefill.followers)]
                self._scheduler.preempt(groups)
                if not self._scheduler.narrow_prefill():
                    return self.fail([prefills[0].leader], out_of_memory(error))
        return None

    def _run_prefill(self, prefills: list[Prefill]) -> list[Request]:
        if self._graphed is not None:
            self._graphed.note_prefill()
        self._write_tables()
        starts = [p.leader.num_computed for p in prefills]
        ends = [p.leader.num_computed + p.num_scheduled for p in prefills]
        leaders = [prefill.leader for prefill in prefills]
        outcome, failed = self._forward(leaders, starts, ends)
        self.counters.prefill_forwards += 1
        self.counters.prefill_tokens += sum(ends[row] - starts[row] for row in outcome.rows)
        rows, requests = self._fork([prefills[row] for row in outcome.rows])
        if requests:
            row_index = devices.to_device(rows, self.device)
            self._sample(outcome.logits_BV.index_select(0, row_index), requests, is_recurring=False)
            if self._drafted is not None:
                self._drafted.proposer.listen(requests)
            now = time.perf_counter()
            for request in requests:
                request.first_token_time = request.first_token_time or now
        return failed + requests

    def _forward(
        self, requests: list[Request], starts: list[int], ends: list[int]
    ) -> tuple[Outcome, list[Request]]:
        """Compute each sequence's tokens from `starts` to `ends`.

        Returns:
            What ran, and the sequences that were ended because they cannot.

        Raises:
            Exception: the model runs nothing at all any more, or memory ran out.
        """
        table_rows = [request.table_row for request in requests]

        def forward(rows: Sequence[int]) -> torch.Tensor:
            return self._runner.logits(
                [requests[row].token_ids[starts[row] : ends[row]] for row in rows],
                [ends[row] for row in rows],
                [table_rows[row] for row in rows],
                self._storage.cache,
                self._storage.table,
            )

        rows = range(len(requests))
        if any(starts) and not self._can_repeat:
            return Outcome([forward(rows)], list(rows), []), []
        outcome = run_isolated(forward, len(rows))
        if outcome.failures and not outcome.rows and not self._runner.is_sound():
            raise outcome.failures[0][1]
        for row, error in outcome.failures:
            self.fail([requests[row]], error)
        return outcome, [requests[row] for row, _ in outcome.failures]

    def _fork(self, prefills: list[Prefill]) -> tuple[list[int], list[Request]]:
        """Complete the computed prompts; returns the logits row of each sequence to sample."""
        rows: list[int] = []
        requests: list[Request] = []
        for row, prefill in enumerate(prefills):
            is_last_chunk = prefill.is_last_chunk
            self._storage.cache.copy_blocks(*self._scheduler.complete_prefill(prefill))
            if not is_last_chunk:
                continue
            source = prefill.leader.table_row
            targets = [follower.table_row for follower in prefill.followers]
            self._storage.cache.copy_states([source] * len(targets), targets)
            group = [prefill.leader, *prefill.followers]
            rows += [row] * len(group)
            requests += group
        return rows, requests

    def decode(self) -> list[Request] | None:
        """Run one forward of the running sequences; None: there are none."""
        while self._scheduler.running:
            try:
                return self._run_decode()
            except Exception as error:
                self.settle()
                is_memory = is_out_of_memory(error)
                if not is_memory and self._can_repeat:
                    raise
                devices.empty_cache(self.device)
                if not self._scheduler.narrow_decode():
                    told = out_of_memory(error) if is_memory else error
                    return self.fail(self._scheduler.running[:1], told)
        return None

    @property
    def _can_repeat(self) -> bool:
        """Whether a decode that raised can be run again: no row's recurrent state has moved on.

        Rows that are not padded run in several forwards, each of which keeps its states.
        """
        layout = self._storage.cache.layout
        return self._runner.batch_layout is BatchLayout.PADDED or not layout.is_recurrent

    def _run_decode(self) -> list[Request]:
        if self._graphed is not None and (collected := self._graphed.collect()) is not None:
            self._count(*collected)
            return collected[0]
        extended = self._scheduler.schedule_decode()
        running = list(self._scheduler.running)
        if not running:
            return []
        self._storage.table.write(extended)
        num_given = None if self._drafted is None else self._drafted.run(running)
        if num_given is None and self._graphed is not None and self._graphed.can_run:
            num_given = self._graphed.run(running)
        if num_given is not None:
            self._count(running, num_given)
            return running
        ends = [request.num_tokens for request in running]
        outcome, failed = self._forward(running, [end - 1 for end in ends], ends)
        survivors = [running[row] for row in outcome.rows]
        self._scheduler.complete_decode(survivors)
        if survivors:
            self._sample(outcome.logits_BV, survivors, is_recurring=True)
        self.counters.decode_forwards += 1
        return failed + survivors

    def _write_tables(self) -> None:
        """Tell the block table about sequences that were just seated."""
        self._storage.table.write(
            [
                (request.table_row, index, block)
                for request in self._scheduler.take_seated()
                for index, block in enumerate(request.block_ids)
            ]
        )

    def _sample(
        self, logits_BV: torch.Tensor, requests: list[Request], *, is_recurring: bool
    ) -> None:
        """Give each request its next token, or end it where there is none for it."""
        version = self._scheduler.blocks.policy_version
        num_given = self._token_sampler.extend(
            requests, logits_BV, version, is_recurring=is_recurring
        )
        self._count(requests, num_given)

    def _count(self, requests: list[Request], num_given: int) -> None:
        """Note what a forward brought."""
        self.counters.tokens_generated += num_given
        self.counters.requests_finished += sum(r.status.is_final for r in requests)
        self.counters.kv_blocks_peak = max(
            self.counters.kv_blocks_peak, self._scheduler.pool.num_used
        )

    def fail(self, requests: list[Request], error: Exception) -> list[Request]:
        """End requests that cannot be served."""
        name = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
        for request in requests:
            request.cause = error
            request.end(RequestStatus.FAILED, FinishReason.ERROR, f"{name}{error}")
            self._scheduler.retire(request)
        self.counters.requests_finished += len(requests)
        return requests
