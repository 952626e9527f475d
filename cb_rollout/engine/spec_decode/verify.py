"""Decode steps of few sequences, each with the tokens that it is expected to say.

A drafted token is a further row of its sequence, one longer than the row before. Every layer writes
the keys of all rows before any attends, so a row finds those of the rows before it, on every path.
"""

import logging
from typing import TYPE_CHECKING

import torch

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.model.decode_rows import DecodeRows
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.engine.spec_decode.ngram import NgramProposer
from cb_rollout.errors import said
from cb_rollout.metrics.counters import EngineCounters

if TYPE_CHECKING:
    from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding

_LOGGER = logging.getLogger(__name__)


def can_draft(runner: ModelRunner, layout: CacheLayout, config: RolloutConfig) -> bool:
    """Whether rows of one sequence can stand in one forward, and drafts are not switched off."""
    can_stand = runner.batch_layout is BatchLayout.PADDED and not layout.is_recurrent
    return can_stand and config.num_speculative_tokens != 0


class DraftedSteps:
    """Runs them for one engine that can."""

    def __init__(
        self,
        proposer: NgramProposer,
        runner: ModelRunner,
        scheduler: Scheduler,
        storage: CacheStorage,
        token_sampler: TokenSampler,
        counters: EngineCounters,
        graphs: "GraphedDecoding | None" = None,
    ) -> None:
        """Join the parts that a step has; without graphs the runner runs it."""
        self.proposer, self._graphs = proposer, graphs
        self._runner, self._scheduler, self._storage = runner, scheduler, storage
        self._token_sampler, self._counters = token_sampler, counters

    def run(self, running: list[Request]) -> int | None:
        """Run one forward of the running sequences and their drafts.

        Returns:
            How many tokens it brought; None: it was not run, since nothing is expected, or its
            forward failed.
        """
        drafts = self.proposer.drafts(running)
        if not drafts:
            return None
        drafts = [self._with_room(r, draft) for r, draft in zip(running, drafts, strict=True)]
        try:
            logits_BV = self._logits(running, drafts)
        except Exception as error:  # noqa: BLE001  without drafts it is found out whose it is
            _LOGGER.debug("a step runs again without its drafts: %s", said(error))
            for request, draft in zip(running, drafts, strict=True):
                self.proposer.note(request, len(draft), 0)
            return None
        version = self._scheduler.blocks.policy_version
        num_given = self._token_sampler.extend_drafted(running, drafts, logits_BV, version)
        self._scheduler.complete_drafted()
        for request, draft, num_tokens in zip(running, drafts, num_given, strict=True):
            num_accepted = max(0, num_tokens - 1)
            self.proposer.note(request, len(draft), num_accepted)
            self._counters.drafted_tokens += len(draft)
            self._counters.accepted_tokens += num_accepted
        self._counters.decode_forwards += 1
        return sum(num_given)

    def _with_room(self, request: Request, draft: list[int]) -> list[int]:
        """The draft, where there are blocks for it without a preemption."""
        blocks = self._scheduler.blocks.extend(request, request.num_tokens + len(draft))
        self._storage.table.write(blocks or [])
        return [] if blocks is None else draft

    def _logits(self, running: list[Request], drafts: list[list[int]]) -> torch.Tensor:
        """float32, `[rows, V]`: after each sequence's last token, then after each drafted one."""
        cache, table = self._storage.cache, self._storage.table
        rows = DecodeRows.of(running, table.block_size, drafts)
        if self._graphs is not None and not self._graphs.is_stepped_into:
            return self._graphs.logits(rows, cache, table)
        tokens = [[token_id] for token_id in rows.token_ids]
        return self._runner.logits(tokens, rows.lengths, rows.table_rows, cache, table)
