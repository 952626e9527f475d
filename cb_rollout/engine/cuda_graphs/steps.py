"""Decode steps under CUDA graphs, each launched before the results of the last are known.

A step leaves on the device what the next one reads, so the device need not wait for the host, which
reads tokens, ends sequences and delivers them meanwhile. A sequence that turns out to have ended
has one row too many in flight, whose token nobody takes. What is launched ahead is given up where
the model is handed back, so none of it outlives the weights that it was computed with. Used by the
thread that steps the engine.
"""

import logging
from typing import TYPE_CHECKING

from cb_rollout.engine.cuda_graphs.pending_step import PendingStep
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.model.decode_rows import DecodeRows
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler, append_each, want_plain_tokens
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.engine.spec_decode.ngram import NgramProposer
from cb_rollout.errors import said
from cb_rollout.metrics.counters import EngineCounters

if TYPE_CHECKING:
    from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding


_LOGGER = logging.getLogger(__name__)


class GraphedSteps:
    """Runs them for one engine."""

    def __init__(
        self,
        graphs: "GraphedDecoding",
        scheduler: Scheduler,
        storage: CacheStorage,
        token_sampler: TokenSampler,
        counters: EngineCounters,
        proposer: NgramProposer | None,
        *,
        looks_ahead: bool,
    ) -> None:
        """Join the parts that a step has.

        Args:
            graphs: runs them.
            scheduler: knows who runs.
            storage: holds the cache.
            token_sampler: samples where a graph does not.
            counters: told what was done.
            proposer: expects what few sequences say, from their newest tokens; None: nobody does.
            looks_ahead: whether a step may be launched before the last one's results are known.
        """
        self._graphs, self._proposer, self._looks_ahead = graphs, proposer, looks_ahead
        self._scheduler, self._storage = scheduler, storage
        self._token_sampler, self._counters = token_sampler, counters
        self._ahead: PendingStep | None = None

    @property
    def can_run(self) -> bool:
        """Whether graphs may be replayed now."""
        return not self._graphs.is_stepped_into

    def run(self, running: list[Request]) -> int:
        """Run one step of all running sequences; how many of them got a token.

        Raises:
            Exception: of a capture, or of the device; no sequence got anything.
        """
        cache, table = self._storage.cache, self._storage.table
        if want_plain_tokens(running):
            lengths = [request.num_tokens for request in running]
            if not self._graphs.follows(running, lengths):
                self._graphs.load(running, table)
            step = self._graphs.launch(running, max(lengths), cache, table)
            return self._finish(step, running)
        logits_BV = self._graphs.logits(DecodeRows.of(running, table.block_size), cache, table)
        version = self._note_computed(running)
        return self._token_sampler.extend(running, logits_BV, version, is_recurring=True)

    def collect(self) -> tuple[list[Request], int] | None:
        """Take the results of a step that was launched ahead.

        Returns:
            Its sequences that still run, and how many of them got a token; None: there are none.

        Raises:
            Exception: as `run`.
        """
        step, self._ahead = self._ahead, None
        current = [] if step is None else step.current()
        if step is None or not current:
            return None
        return current, self._finish(step, current)

    def forget(self) -> None:
        """Give up what was launched ahead; whoever needs the device to be done waits for it."""
        self._ahead = None
        self._graphs.forget_rows()

    def note_prefill(self) -> None:
        """Slots may get other sequences, and more come to run: no step follows the last one."""
        self._graphs.forget_rows()

    def _finish(self, step: PendingStep, current: list[Request]) -> int:
        """Launch the next step where that may be, then take this one's results."""
        try:
            self._ahead = self._launched_after(current)
        except Exception as error:  # noqa: BLE001  it may not be needed; if it is, it fails again
            _LOGGER.debug("a step waits for the last one's tokens: %s", said(error))
            self._graphs.forget_rows()
        tokens, logprobs, is_valid = step.read(current)
        return append_each(current, tokens, logprobs, is_valid, self._note_computed(current))

    def _note_computed(self, requests: list[Request]) -> int:
        """Account for a step of these sequences; the policy version that computed it."""
        self._scheduler.complete_decode(requests)
        self._counters.decode_forwards += 1
        return self._scheduler.blocks.policy_version

    def _launched_after(self, current: list[Request]) -> PendingStep | None:
        """The step after one that is yet to be read; None: it has to wait for that.

        For sequences that joined, for drafts, for a smaller graph, and for blocks that another
        sequence would have to give up.
        """
        if not self._looks_ahead:
            return None
        going = [r for r in current if r.num_generated + 1 < r.max_new_tokens]
        lengths = [request.num_tokens + 1 for request in going]
        is_drafted = self._proposer is not None and self._proposer.most_drafted(len(going)) > 0
        if not going or is_drafted or not self._graphs.follows(going, lengths):
            return None
        extended = self._scheduler.blocks.extend_ahead(going)
        if extended is None:
            return None
        cache, table = self._storage.cache, self._storage.table
        table.write(extended)
        return self._graphs.launch(going, max(lengths), cache, table)
