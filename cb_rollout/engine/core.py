"""The step loop: schedule, run, sample, hand back what ended.

Owns the paged cache and the policy version that tokens are stamped with. One thread calls it.
"""

import time
from contextlib import ExitStack
from itertools import islice

import torch
from transformers import PreTrainedModel

from cb_rollout import _compat
from cb_rollout.config import LogprobsMode, RolloutConfig
from cb_rollout.engine import device as devices
from cb_rollout.engine.limits import Limits
from cb_rollout.engine.rehearsal import rehearse
from cb_rollout.engine.request import Prefill, Request
from cb_rollout.engine.runner import ModelRunner, leased
from cb_rollout.engine.sampler import SamplingBatch, create_sampling_batch, sample
from cb_rollout.engine.scheduler import Scheduler
from cb_rollout.engine.storage import CacheStorage, plan_memory
from cb_rollout.metrics import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus


class Engine:
    """Serves requests with one model, by continuous batching over a paged cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        """Probe the model and plan the memory; pages are allocated at the first step.

        Args:
            model: the unwrapped model.
            config: settings; what it leaves open is chosen here.
            autocast_dtype: run forwards under autocast to this dtype; None: as the model is.

        Raises:
            ConfigurationError: the model cannot run on pages.
        """
        self.config = config
        self.counters = EngineCounters()
        self.policy_version = 0
        self._runner = ModelRunner(model, autocast_dtype)
        self._logprobs_mode = LogprobsMode(config.logprobs_mode)
        self._lease = ExitStack()
        self._is_leased = False
        self._probe()
        self._start_empty()

    def _probe(self) -> None:
        """Learn the cache's layout, and plan its memory."""
        model, config = self._runner.model, self.config
        self._identity = _compat.forward_identity(model)
        self.layout = rehearse(self._runner)
        self.device = self._runner.device
        self.limits = Limits(
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens or devices.max_batch_tokens(self.device),
            max_requests=config.max_requests_per_batch
            or devices.max_requests_per_batch(self.device),
            can_share_blocks=config.allow_block_sharing,
            can_resume_prompts=not self.layout.is_recurrent,
        )
        self.memory_plan = plan_memory(model, config, self.layout, self.limits, self.device)

    def _start_empty(self) -> None:
        self._storage = CacheStorage(self.layout, self.limits, self.memory_plan, self.device)
        self._sampling: tuple[list[Request], SamplingBatch] | None = None
        self._scheduler = Scheduler(self.limits, self.counters, self._storage.grow)
        self._scheduler.policy_version = self.policy_version

    @property
    def model(self) -> PreTrainedModel:
        """The model that generates."""
        return self._runner.model

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens, prompt and completion together, of the longest sequence that fits the cache."""
        num_blocks = self.memory_plan.num_blocks
        if self.config.max_blocks_per_request:
            num_blocks = min(num_blocks, self.config.max_blocks_per_request)
        return num_blocks * self.limits.block_size

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted yet."""
        return self._scheduler.num_waiting

    @property
    def num_blocks_used(self) -> int:
        """KV cache blocks in use by unfinished sequences."""
        return self._scheduler.pool.num_used

    @property
    def cache_bytes(self) -> int:
        """Bytes held for keys, values and states now."""
        return self._storage.num_bytes

    def add(self, request: Request) -> None:
        """Queue a validated sequence."""
        self._scheduler.add(request)

    def end(
        self,
        request: Request,
        status: RequestStatus,
        reason: FinishReason,
        error: str | None = None,
    ) -> None:
        """End an unfinished sequence from outside, keeping what it has."""
        request.end(status, reason, error)
        self._scheduler.retire(request)

    def set_policy_version(self, policy_version: int) -> None:
        """The weights changed: stamp this version, and compute every cached key anew."""
        self.policy_version = policy_version
        self._scheduler.recompute_all(policy_version)
        if _compat.forward_identity(self.model) != self._identity:
            self.release_cache()
            self._probe()
            self.release_cache()

    def release_cache(self) -> None:
        """Give the cache's memory back; unfinished sequences are computed anew afterwards."""
        self._scheduler.recompute_all(self.policy_version)
        waiting = [request for request in self._scheduler.waiting if not request.status.is_final]
        self._start_empty()
        self._scheduler.waiting.extend(waiting)

    def recompute(self, request: Request) -> list[float]:
        """A sequence's log-probabilities by one plain forward, without the cache."""
        temperature = 1.0 if request.params.is_greedy else request.params.temperature
        with leased(self.model):
            return self._runner.recompute(request.token_ids, len(request.prompt_ids), temperature)

    def step(self) -> list[Request]:
        """Run at most one prefill and one decode forward.

        Returns:
            The sequences that got a token or ended, each once.
        """
        with devices.current(self.device):
            return self._step()

    def _step(self) -> list[Request]:
        if not self._is_leased:
            self._lease.enter_context(leased(self.model))
            self._is_leased = True
        if not self._storage.is_allocated:
            self._allocate()
        plan = self.memory_plan
        touched = dict.fromkeys([*self._prefill(), *self._decode()])
        self._scheduler.retire_running()
        if not self.has_work:
            self.hand_back_model()
        elif not touched and (request := self._scheduler.unservable(plan.num_blocks)):
            error = f"{request.num_tokens} tokens do not fit {plan.num_blocks} KV cache blocks of "
            error += f"{self.limits.block_size}; raise num_blocks or max_memory_percent."
            self.end(request, RequestStatus.FAILED, FinishReason.ERROR, error)
            return [request]
        return list(touched)

    def hand_back_model(self) -> None:
        """Put the model's training flags back; the next step takes it again."""
        self._lease.close()
        self._is_leased = False

    def abandon(self) -> None:
        """Forget every request and everything cached."""
        self.hand_back_model()
        self._start_empty()

    def _allocate(self) -> None:
        """Allocate pages for what waits, within the plan."""
        waiting = islice(self._scheduler.waiting, self.limits.max_requests)
        num_tokens = [len(r.prompt_ids) + r.max_new_tokens for r in waiting]
        needed = sum(-(-count // self.limits.block_size) for count in num_tokens)
        self._scheduler.pool.grow(self._storage.allocate(needed))

    def _prefill(self) -> list[Request]:
        prefills = self._scheduler.schedule_prefill()
        if not prefills:
            return []
        self._write_tables()
        started = time.perf_counter()
        leaders = [prefill.leader for prefill in prefills]
        ends = [p.leader.num_computed + p.num_scheduled for p in prefills]
        chunks = [
            leader.token_ids[leader.num_computed : end]
            for leader, end in zip(leaders, ends, strict=True)
        ]
        slots = [leader.slot for leader in leaders]
        logits_BV = self._runner.logits(
            chunks, ends, slots, self._storage.cache, self._storage.table
        )
        rows, requests = self._fork(prefills)
        if requests:
            row_index = torch.tensor(rows, device=self.device)
            self._sample(logits_BV.index_select(0, row_index), requests, None)
        self.counters.prefill_forwards += 1
        self.counters.prefill_tokens += sum(map(len, chunks))
        self.counters.prefill_seconds += time.perf_counter() - started
        return requests

    def _fork(self, prefills: list[Prefill]) -> tuple[list[int], list[Request]]:
        """Complete the computed prompts; returns the logits row of each sequence to sample."""
        rows: list[int] = []
        requests: list[Request] = []
        for row, prefill in enumerate(prefills):
            is_last_chunk = prefill.is_last_chunk
            self._storage.cache.copy_blocks(*self._scheduler.complete_prefill(prefill))
            if not is_last_chunk:
                continue
            source = prefill.leader.slot
            targets = [follower.slot for follower in prefill.followers]
            self._storage.cache.copy_slots([source] * len(targets), targets)
            group = [prefill.leader, *prefill.followers]
            rows += [row] * len(group)
            requests += group
        return rows, requests

    def _decode(self) -> list[Request]:
        self._scheduler.retire_running()
        extended = self._scheduler.schedule_decode()
        running = self._scheduler.running
        if not running:
            return []
        started = time.perf_counter()
        self._storage.table.write([(r.slot, len(r.block_ids) - 1, block) for r, block in extended])
        logits_BV = self._runner.logits(
            [r.token_ids[-1:] for r in running],
            [r.num_tokens for r in running],
            [r.slot for r in running],
            self._storage.cache,
            self._storage.table,
        )
        self._scheduler.complete_decode()
        touched = list(running)
        self._sample(logits_BV, touched, self._sampling_batch(running))
        self.counters.decode_forwards += 1
        self.counters.decode_seconds += time.perf_counter() - started
        return touched

    def _write_tables(self) -> None:
        """Tell the block table about sequences that were just seated."""
        self._storage.table.write(
            [
                (request.slot, index, block)
                for request in self._scheduler.take_seated()
                for index, block in enumerate(request.block_ids)
            ]
        )

    def _sampling_batch(self, running: list[Request]) -> SamplingBatch:
        """The running rows' parameters, kept until the rows change."""
        if self._sampling is None or self._sampling[0] != running:
            batch = create_sampling_batch(running, self.device)
            self._sampling = (list(running), batch)
        return self._sampling[1]

    def _sample(
        self, logits_BV: torch.Tensor, requests: list[Request], batch: SamplingBatch | None
    ) -> None:
        """Give each request its next token, or end it where its logits make no distribution."""
        if batch is None:
            batch = create_sampling_batch(requests, self.device)
        indices_B = torch.tensor([r.num_generated for r in requests], device=self.device)
        tokens, logprobs, is_valid = (
            result.tolist() for result in sample(logits_BV, batch, indices_B, self._logprobs_mode)
        )
        for request, token, logprob, valid in zip(
            requests, tokens, logprobs, is_valid, strict=True
        ):
            if valid:
                request.append(token, logprob, self.policy_version)
            else:
                request.end(
                    RequestStatus.FAILED,
                    FinishReason.ERROR,
                    f"the model's logits after {request.num_tokens} tokens are NaN or infinite; "
                    "look at the weights (a diverged step?) or raise rollout_dtype.",
                )
        self.counters.tokens_generated += sum(is_valid)
        self.counters.requests_finished += sum(r.status.is_final for r in requests)
        self.counters.kv_blocks_peak = max(
            self.counters.kv_blocks_peak, self._scheduler.pool.num_used
        )
