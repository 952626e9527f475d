"""Run one step: a scheduled forward, and a token for each sequence that it completes.

Owns the order of prefills and decode steps, and the recovery of a step that runs out of memory. The
`DecodePath` decides how a decode step runs. Called by the thread that steps the engine. B: rows of
a forward, V: vocabulary.
"""

import time

import torch

from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.decode.path import DecodePath
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import is_out_of_memory, out_of_memory
from cb_rollout.engine.request import Prefill, Request, members
from cb_rollout.types import RequestStatus


class StepExecutor:
    """Run prefill and decode steps for an engine's whole life."""

    def __init__(
        self,
        context: StepContext,
        decode_path: DecodePath,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Run nothing yet.

        Args:
            context: the parts of the engine that steps work on.
            decode_path: runs decode steps, until `reset` replaces it.
            stream: the CUDA stream of all work; None: the stream of the thread that steps.
        """
        self.context = context
        self.decode_path = decode_path
        self.stream = stream
        self.device = context.runner.device
        self._scheduler = context.scheduler
        self._end: torch.cuda.Event | None = None

    def reset(self, decode_path: DecodePath) -> None:
        """Discard the state of the last step; run decode steps with this path from now on."""
        self.decode_path = decode_path
        self.context.token_sampler.forget_rows()
        decode_path.discard_launched()

    def run(self) -> list[Request] | None:
        """Run a forward, of prompts or of running sequences; None: neither can run."""
        # The last forward may have run in another thread, and in that thread's stream.
        devices.wait_event(self._end, self.device)
        self._resume()
        touched = self._run_turn()
        self._end = devices.record_event(self.device)
        return touched

    def _run_turn(self) -> list[Request] | None:
        scheduler = self._scheduler
        is_prefill_first = scheduler.is_prefill_next
        for is_prefill in (is_prefill_first, not is_prefill_first):
            touched = self.prefill() if is_prefill else self.decode()
            if touched is not None:
                scheduler.record_turn(is_prefill=is_prefill)
                return touched
        return None

    def _resume(self) -> None:
        """Resume sequences whose keys are copied back from the host."""
        if self._scheduler.resume():
            self.decode_path.forget_rows()
            self._write_admitted()

    def _write_admitted(self) -> None:
        """Write the blocks of the sequences that were admitted into the block table."""
        entries: list[tuple[int, int, int]] = []
        for request in self._scheduler.take_admitted():
            for index, block in enumerate(request.block_ids):
                entries.append((request.table_row, index, block))
        self.context.storage.table.write(entries)

    def settle(self) -> None:
        """Give up the pending step, and return when the device has finished the engine's work."""
        self.decode_path.discard_launched()
        devices.finish(self.device, self.stream)

    def fail(self, requests: list[Request], error: Exception) -> list[Request]:
        """End sequences with an error; return them."""
        return self.context.fail(requests, error)

    def prefill(self) -> list[Request] | None:
        """Run scheduled prompts, fewer if memory runs out; None: no prompt can run."""
        while prefills := self._scheduler.schedule_prefill():
            try:
                return self._run_prefill(prefills)
            except Exception as error:
                if self.context.runner.is_split or not is_out_of_memory(error):
                    raise
                devices.empty_cache(self.device)
                self._scheduler.preempt(members(prefills))
                if not self._scheduler.narrow_prefill():
                    return self.fail([prefills[0].leader], out_of_memory(error))
        return None

    def _run_prefill(self, prefills: list[Prefill]) -> list[Request]:
        context = self.context
        offloader = self._scheduler.offloader
        # Table rows may get other sequences, so the next step cannot reuse the last step's inputs.
        self.decode_path.forget_rows()
        self._write_admitted()
        started = time.perf_counter()
        leaders: list[Request] = []
        ends: list[int] = []
        for prefill in prefills:
            leaders.append(prefill.leader)
            ends.append(prefill.leader.num_computed + prefill.num_scheduled)
        logits_BV, computed, failed = context.forward(leaders, ends)
        prefills = [prefills[row] for row in computed]
        self._count_prefill(prefills)
        rows, requests = self._fork(prefills)
        if requests:
            logits_BV = logits_BV.index_select(0, devices.to_device(rows, self.device))
            context.sample(requests, logits_BV, is_recurring=False)
            now = time.perf_counter()
            if offloader is not None:
                # Sampling waited for the forward.
                num_tokens = sum(prefill.num_scheduled for prefill in prefills)
                offloader.speeds.record_prefill(num_tokens, now - started)
            for request in requests:
                request.first_token_time = request.first_token_time or now
        return failed + requests

    def _count_prefill(self, prefills: list[Prefill]) -> None:
        counters = self.context.counters
        counters.prefill_forwards += 1
        counters.rows_computed += len(prefills)
        for prefill in prefills:
            counters.prefill_tokens += prefill.num_scheduled
            images = prefill.leader.images
            if images:
                counters.images_encoded += len(images.after(prefill.leader.num_computed))

    def _fork(self, prefills: list[Prefill]) -> tuple[list[int], list[Request]]:
        """Complete the computed prompts; return the logits row of each sequence to sample."""
        cache = self.context.storage.cache
        rows: list[int] = []
        requests: list[Request] = []
        for row, prefill in enumerate(prefills):
            sources, targets = self._scheduler.complete_prefill(prefill)
            cache.copy_blocks(sources, targets)
            if prefill.leader.status is RequestStatus.DECODING:
                followers = [follower.table_row for follower in prefill.followers]
                cache.copy_states([prefill.leader.table_row] * len(followers), followers)
                group = members([prefill])
                rows += [row] * len(group)
                requests += group
        return rows, requests

    def decode(self) -> list[Request] | None:
        """Run a decode step, with fewer sequences if memory runs out; None: no sequence runs."""
        while self._scheduler.running:
            try:
                return self._run_decode()
            except Exception as error:
                self.settle()
                is_memory = is_out_of_memory(error)
                if self.context.runner.is_split:
                    raise
                if not is_memory and self.context.can_repeat(self._scheduler.running):
                    raise
                devices.empty_cache(self.device)
                if not self._scheduler.narrow_decode():
                    cause = out_of_memory(error) if is_memory else error
                    return self.fail(self._scheduler.running[:1], cause)
        return None

    def _run_decode(self) -> list[Request]:
        running = self.decode_path.launched()
        if not running:
            running = self._schedule_decode()
        if not running:
            return []
        return self.decode_path.step(running, self.context)

    def _schedule_decode(self) -> list[Request]:
        """Return the running sequences, with blocks for one more token."""
        extended = self._scheduler.schedule_decode()
        running = list(self._scheduler.running)
        if running:
            self.context.storage.table.write(extended)
        return running
