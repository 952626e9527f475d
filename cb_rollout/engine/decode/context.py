"""Hold the shared state of an engine's prefill and decode steps, and their common operations.

Owns the recovery from a forward that fails. Called by the thread that steps the engine. B: rows of
a forward, V: vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cb_rollout.engine.attention.compiled_graph import CompilationFailedError
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import HostSampled, TokenSampler
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.errors import RolloutError
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import RequestStatus


@dataclass(eq=False)
class StepContext:
    """The parts of an engine that its steps work on.

    Args:
        runner: runs the model's forward.
        scheduler: knows the sequences and their blocks.
        storage: holds the paged cache and the block table.
        token_sampler: draws tokens and appends them.
        counters: count forwards, tokens and sequences.
    """

    runner: ModelRunner
    scheduler: Scheduler
    storage: CacheStorage
    token_sampler: TokenSampler
    counters: EngineCounters

    @property
    def policy_version(self) -> int:
        return self.scheduler.blocks.policy_version

    def batch(
        self, requests: Sequence[Request], lengths: Sequence[int], routes: Sequence[Any] = ()
    ) -> ForwardBatch:
        """Return the rows of a forward: each sequence's uncomputed tokens up to its length.

        Args:
            requests: sequences with blocks for `lengths` tokens.
            lengths: tokens of each sequence, including the last token to compute.
            routes: experts that the rows take again, as in `ForwardBatch.routes`.
        """
        storage = self.storage
        return ForwardBatch.of(requests, lengths, storage.cache, storage.table, routes)

    def forward(
        self, requests: list[Request], ends: list[int]
    ) -> tuple[torch.Tensor, list[int], list[Request]]:
        """Compute each sequence's tokens up to `ends` that are not computed yet.

        Returns float32 logits after each sequence that ran, `[rows, V]`, the indices of these
        sequences in `requests`, and the failed sequences, whose rows raised. Raises if the model
        cannot run anything any more, or if memory ran out.
        """

        def forward(rows: Sequence[int]) -> torch.Tensor:
            chosen = [requests[row] for row in rows]
            lengths = [ends[row] for row in rows]
            prompts = [(r.prompt_ids, r.images) for r in chosen if r.images is not None]
            if prompts:
                self.runner.image_inputs.find_positions(prompts)
            routes = [self._known_routes(request) for request in chosen]
            return self.runner.logits(self.batch(chosen, lengths, routes))

        rows = range(len(requests))
        has_history = any(request.num_computed for request in requests)
        # Other processes would wait in a forward that raises here and is run again.
        if self.runner.is_split or (has_history and not self.can_repeat(requests)):
            return forward(rows), list(rows), []
        logits_BV, computed, failures = run_isolated(forward, len(rows))
        if failures and not computed and not self.runner.is_sound():
            raise failures[0][1]
        failed: list[Request] = []
        for row, error in failures:
            failed += self.fail([requests[row]], error)
        return logits_BV, computed, failed

    def _known_routes(self, request: Request) -> Any:
        """Return the experts that its next tokens took before the sequence lost its blocks."""
        routes = request.routed_experts
        if routes is None or request.num_computed >= len(routes):
            return None
        if request.policy_starts[-1][0] != self.policy_version:
            # Another sequence would choose its experts by the new policy.
            request.has_old_keys = True
        return routes[request.num_computed :]

    def can_repeat(self, requests: Sequence[Request]) -> bool:
        """Return whether a decode that raised can run again: no row's recurrent state has moved on.

        Rows that are not padded, or of several adapters, run in several forwards, and a GPU stores
        states layer by layer.

        Args:
            requests: the sequences of the decode.
        """
        if not self.storage.cache.layout.is_recurrent:
            return True
        backend = self.runner.attention_backend
        num_adapters = len({request.params.adapter for request in requests})
        is_one_forward = self.runner.batch_layout.takes_any_lengths and num_adapters <= 1
        return is_one_forward and (backend is None or backend.saves_at_end)

    def sample(
        self, requests: list[Request], logits_BV: torch.Tensor, *, is_recurring: bool
    ) -> None:
        """Append a token, drawn from its row of logits, to every sequence, and count.

        Args:
            requests: sequences whose newest token was computed.
            logits_BV: float32, a row for each sequence.
            is_recurring: True if the next step is likely to have the same rows.
        """
        num_given = self.token_sampler.extend(
            requests, logits_BV, self.policy_version, is_recurring=is_recurring
        )
        self.count(requests, num_given)

    def finish_decode(self, requests: list[Request], logits_BV: torch.Tensor) -> list[Request]:
        """Sample a decode step's tokens, and account for the step; return the sequences."""
        if requests:
            self.sample(requests, logits_BV, is_recurring=True)
        # Not earlier: a step without memory to sample runs again, or its sequences are preempted.
        self.scheduler.complete_decode(requests)
        return requests

    def append_decoded(self, requests: list[Request], results: HostSampled) -> list[Request]:
        """Append tokens that a decode step sampled itself, and account for the step."""
        num_given = self.token_sampler.append(requests, results, self.policy_version)
        self.scheduler.complete_decode(requests)
        self.count(requests, num_given)
        return requests

    def count(self, requests: list[Request], num_given: int) -> None:
        """Count `num_given` new tokens, and the sequences that ended."""
        decoding = RequestStatus.DECODING
        ended = [r for r in requests if r.status is not decoding and r.status.is_final]
        self.counters.tokens_generated += num_given
        self.counters.requests_finished += len(ended)
        num_used = self.scheduler.pool.num_used
        self.counters.kv_blocks_peak = max(self.counters.kv_blocks_peak, num_used)

    def fail(self, requests: list[Request], error: Exception) -> list[Request]:
        """End sequences with an error, and free their blocks; return them."""
        name = "" if isinstance(error, RolloutError) else f"{type(error).__name__}: "
        for request in requests:
            request.fail(f"{name}{error}", error)
            self.scheduler.retire(request)
        self.counters.requests_finished += len(requests)
        return requests


def run_isolated(
    forward: Callable[[Sequence[int]], torch.Tensor], num_rows: int
) -> tuple[torch.Tensor, list[int], list[tuple[int, Exception]]]:
    """Run a forward over rows `0 .. num_rows - 1`; where it raises, find the rows at fault.

    Halves are tried until the bad rows are alone. A `forward` that raises must leave the cache
    unchanged, or overwrite it when it runs again. Out-of-memory errors and failed compilations are
    raised.

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
            # No row is at fault.
            if is_out_of_memory(error) or isinstance(error, CompilationFailedError):
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
