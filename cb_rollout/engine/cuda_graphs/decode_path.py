"""Run decode steps as CUDA graphs, each launched before the last one's tokens are read.

Owns the pending step, and the time at which graphs are captured. A step leaves the next one's
inputs on the device, so the next step is launched before this one's tokens are read. A sequence
that turns out to have ended has one row too many, whose token is dropped. Called by the thread that
steps the engine.
"""

import logging

import torch

from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, PendingStep
from cb_rollout.engine.cuda_graphs.ladder import DecodeLadder
from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.decode.findings import ProofFinding
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.decode.stepwise import StepwiseDecoding
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Limits, Request
from cb_rollout.errors import error_text

_LOGGER = logging.getLogger(__name__)


class CudaGraphDecoding(StepwiseDecoding):
    """The `DecodePath` of captured steps; a step that no graph runs is a plain one."""

    def __init__(
        self,
        runner: ModelRunner,
        graphs: GraphedDecoding,
        block_size: int,
        *,
        looks_ahead: bool,
        ladder: DecodeLadder | None = None,
    ) -> None:
        """Launch nothing yet.

        Args:
            runner: runs the steps that no graph runs.
            graphs: captured and proved by `GraphedDecoding.check_model`.
            block_size: tokens of a page, which graphs are captured for.
            looks_ahead: True: launch a step before the last one's tokens are read, where recurrent
                states do not forbid it.
            ladder: proves the graphs again after a compilation; None: nothing does.
        """
        super().__init__(runner)
        self.graphs = graphs
        self.looks_ahead = looks_ahead and graphs.can_look_ahead
        self._block_size = block_size
        self._ladder = ladder
        self._pending: PendingStep | None = None

    @property
    def paths(self) -> list[ExecutionPath]:
        runs = "on, a step ahead" if self.looks_ahead else "on"
        obstacle = ""
        if self.graphs.obstacle:
            obstacle = f"not {self.graphs.obstacle}"
        paths = super().paths
        paths.append(ExecutionPath("CUDA graphs", runs, obstacle))
        if self._ladder is not None:
            paths += self._ladder.paths
        return paths

    @property
    def planned_bytes(self) -> int:
        return self.graphs.planned_bytes

    @property
    def num_bytes(self) -> int:
        return self.graphs.num_bytes

    @property
    def is_released(self) -> bool:
        return self.graphs.is_dropped

    @property
    def is_wanting(self) -> bool:
        return self.graphs.is_wanting

    def check_weights(self) -> None:
        self.graphs.check_weights()

    def begin(self) -> None:
        if self.graphs.is_dropped:
            self._capture(with_wanted=False)

    def warm_up(self, num_steps: float) -> None:
        super().warm_up(num_steps)
        self._capture(with_wanted=True)

    def _capture(self, *, with_wanted: bool) -> None:
        """Capture the graphs that are missing, and those that steps want if `with_wanted`."""
        try:
            self._capture_missing(with_wanted=with_wanted)
            # Graphs that were captured before memory ran out run too, so they are proved.
            if self._ladder is not None and self._ladder.is_due(self.graphs):
                self._ladder.settle(self.graphs)
        except Exception as error:  # noqa: BLE001  kernels run what cannot be captured
            self.graphs.give_up(f"now, since capturing the forward failed ({error_text(error)})")
            devices.empty_cache(self.runner.device)

    def _capture_missing(self, *, with_wanted: bool) -> None:
        """Capture as many graphs as memory holds; Args: see `_capture`."""
        try:
            self.graphs.capture_sizes(self._block_size)
            if with_wanted:
                self.graphs.capture_wanted(self._block_size)
        except torch.OutOfMemoryError as error:
            devices.empty_cache(self.runner.device)
            _LOGGER.warning(
                "no memory to capture all CUDA graphs (%s); the other steps run the graph of a "
                "larger batch, or no graph, and are slower. Lower max_memory_percent or "
                "max_requests_per_batch.",
                error,
            )

    def prove(self) -> list[ProofFinding]:
        if self._ladder is None:
            return []
        return self._ladder.prove(self.graphs)

    def step_down(self, finding: ProofFinding) -> bool:
        return self._ladder is not None and self._ladder.leave(self.graphs, finding)

    def release(self) -> None:
        self.graphs.release()
        devices.empty_cache(self.runner.device)

    def launched(self) -> list[Request]:
        if self._pending is None:
            return []
        running = self._pending.running
        if not running:
            self._pending = None
        return running

    def step(self, running: list[Request], context: StepContext) -> list[Request]:
        pending = self._pending
        self._pending = None
        if pending is not None:
            return self._finish(pending, running, context)
        if not self._can_replay(running, context):
            return super().step(running, context)
        lengths = [request.num_tokens for request in running]
        if not self.graphs.can_sample(running):
            logits_BV = self.graphs.logits(context.batch(running, lengths))
            return context.finish_decode(running, logits_BV)
        if not self.graphs.follows(running, lengths):
            self.graphs.load(context.batch(running, lengths), running)
        storage = context.storage
        launched = self.graphs.launch(running, lengths, storage.cache, storage.table)
        return self._finish(launched, running, context)

    def _can_replay(self, running: list[Request], context: StepContext) -> bool:
        if not self.graphs.can_run(len(running)):
            return False
        if any(request.params.adapter is not None for request in running):
            # A graph has the weights of the active adapters.
            return False
        # A graph takes one set of rotary factors for all rows: that of the newest positions.
        limits = context.scheduler.limits.rope_limits
        return not limits or len({request.rope_side for request in running}) == 1

    def _finish(
        self, step: PendingStep, running: list[Request], context: StepContext
    ) -> list[Request]:
        """Launch the next step, then read this step's tokens and append them."""
        try:
            self._pending = self._launch_next(running, context)
        except Exception as error:  # noqa: BLE001  a step that is needed will fail again
            _LOGGER.debug("a step waits for the last one's tokens: %s", error_text(error))
            self.graphs.forget_rows()
        return context.append_decoded(running, step.read(running))

    def _launch_next(self, running: list[Request], context: StepContext) -> PendingStep | None:
        """Launch the next step before this step's tokens are read; None if it has to wait for them.

        It waits if a sequence joined, a smaller graph fits, a sequence's keys change, its blocks
        would take a preemption, or the step moves recurrent states.
        """
        if not self.looks_ahead:
            return None
        going: list[Request] = []
        lengths: list[int] = []
        for request in running:
            # Without properties: this runs for every row of every step.
            num_tokens = len(request.token_ids) + 1
            if num_tokens - len(request.prompt_ids) < request.max_new_tokens:
                going.append(request)
                lengths.append(num_tokens)
        if not going or not self.graphs.follows(going, lengths):
            return None
        if _changes_rope(going, lengths, context.scheduler.limits):
            return None
        extended = context.scheduler.blocks.extend_ahead(going)
        if extended is None:
            return None
        storage = context.storage
        storage.table.write(extended)
        return self.graphs.launch(going, lengths, storage.cache, storage.table)

    def forget_rows(self) -> None:
        self.graphs.forget_rows()

    def discard_launched(self) -> None:
        self._pending = None
        self.graphs.forget_rows()


def _changes_rope(requests: list[Request], lengths: list[int], limits: Limits) -> bool:
    """Return whether a sequence has other rotary frequencies at its new length than at its last."""
    if not limits.rope_limits:
        return False
    for request, length in zip(requests, lengths, strict=True):
        if limits.rope_side(length) != request.rope_side:
            return True
    return False
