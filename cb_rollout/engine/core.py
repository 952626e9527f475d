"""Join the engine's parts: plan the memory, step the executor, change policy versions.

Owns the paged cache and the policy version that tokens are stamped with. Called by one thread at a
time.
"""

import logging
from contextlib import ExitStack
from functools import partial

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.cuda_graphs.selection import choose_compilation, create_graphs
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.kv_cache.offload import KVOffloader
from cb_rollout.engine.kv_cache.sizing import max_requests_per_batch, page_layout, plan_memory
from cb_rollout.engine.kv_cache.storage import CacheStorage, create_saver
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.memory.training import OptimizerOrName, TrainingMemory
from cb_rollout.engine.model.check import check_images, check_model
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.request import Limits, Request
from cb_rollout.engine.sampling.sampler import create_token_sampler
from cb_rollout.engine.scheduler.policy import create_policy
from cb_rollout.engine.scheduler.scheduler import HISTORY_FACTOR, Scheduler
from cb_rollout.engine.spec_decode.ngram import MAX_DRAFT_ROWS, NgramProposer, can_draft
from cb_rollout.errors import OutOfCacheMemoryError, RolloutError
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Generates tokens with one model, by continuous batching over a paged cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        autocast_dtype: torch.dtype | None = None,
        trained: torch.nn.Module | None = None,
        optimizer: OptimizerOrName | None = None,
    ) -> None:
        """Probe the model and plan the memory; pages are allocated at the first step.

        Args:
            model: the unwrapped model.
            config: settings; "auto" values are resolved here.
            autocast_dtype: run forwards under autocast to this dtype; None: without autocast.
            trained: the model that trains, where `model` is a copy of it; None: `model` itself.
            optimizer: steps the model that trains, or names the class that will; None: not known.

        Raises:
            ConfigurationError: the model cannot run on pages, or a setting cannot be honoured.
            OutOfCacheMemoryError: not even one block fits.
        """
        self.config = config
        self.counters = EngineCounters()
        self.policy_version = 0
        self._runner = ModelRunner(model, autocast_dtype)
        self._eval_mode: ExitStack | None = None
        self.trained = trained or model
        self.device = self._runner.device
        self.training = TrainingMemory(
            self.trained, model, self.device, optimizer, config.training_reserve_gib
        )
        self._proposer = NgramProposer(config.num_speculative_tokens)
        with devices.plain_modes():
            self._probe()
        saver = create_saver(self.device)
        self._storage = CacheStorage(self.layout, self.limits, self.memory_plan, self.device, saver)
        offload_bytes, offloader = int(config.cpu_offload_gib * GIB), None
        if offload_bytes:
            offloader = KVOffloader(self._storage, config.block_size, offload_bytes)
        policy = create_policy(config.scheduler_type)
        self._scheduler = Scheduler(self.limits, self.counters, self._grow, policy, offloader)
        self._executor = StepExecutor(
            self._runner,
            self._scheduler,
            self._storage,
            create_token_sampler(config, self.device, self.counters),
            self.counters,
            looks_ahead=config.looks_ahead,
        )
        self._reset_executor()
        self._given: torch.cuda.Event | None = None
        self.receive_model()

    def _probe(self) -> None:
        """Probe the cache's layout, select how decode steps run, and plan the memory."""
        devices.require_unmoved(self.model, self.device)
        identity = hf_compat.forward_identity(self.model)
        self.layout = check_model(
            self._runner, partial(page_layout, config=self.config, device=self.device)
        )
        # Once for each layout: a later plan may find the trace given up, for other reasons.
        self._compilation = choose_compilation(self._runner, self.config)
        self.takes_images = False
        """True once a prompt with images was found to run right."""
        self._has_drafts = can_draft(self._runner, self.layout, self.config)
        max_rows = max_requests_per_batch(self.config, self.device)
        if self._has_drafts:
            max_rows = max(max_rows, MAX_DRAFT_ROWS)
        # Captured before the memory is planned, which then knows what is left.
        self._graphs, self._graphs_phrase = create_graphs(
            self._runner, self.config, max_rows, self.layout.is_recurrent
        )
        self._plan()
        self._identity = identity

    @property
    def decode_path(self) -> str:
        """Return how decode steps run at present, in words."""
        backend = self._runner.attention_backend
        traced = None if backend is None else backend.traced_forward
        forwards = "" if traced is None else f"; forwards: {traced}"
        has_hooks = self._graphs is not None and self._graphs.has_hooks
        hooks = "; not while the model has forward hooks, as it has now" if has_hooks else ""
        return f"{self._runner.backend_selection}{forwards}; {self._chosen}{hooks}"

    @property
    def _is_without_graphs(self) -> bool:
        """Return whether a CUDA device runs decode steps without graphs, unasked."""
        return (
            self.device.type == "cuda"
            and self._graphs is None
            and self.config.wants_graphs is not False
        )

    @property
    def _is_model_changed(self) -> bool:
        """Return whether the model's forwards may differ from those that were probed."""
        return hf_compat.forward_identity(self.model) != self._identity

    def _plan(self) -> None:
        """Divide the free memory; no cache may be allocated."""
        config = self.config
        plan = plan_memory(
            self.layout,
            config,
            self.training.bytes_now(),
            vocab_size=hf_compat.vocab_size(self.model),
            compute_dtype=self._runner.compute_dtype,
            num_heads=hf_compat.num_query_heads(self.model),
            history_factor=HISTORY_FACTOR if not self.layout.is_recurrent else 1,
            max_sequence_tokens=(
                hf_compat.max_positions(self.model) if self._runner.attention_backend else None
            ),
            graph_bytes=0 if self._graphs is None else self._graphs.num_bytes,
            device=self.device,
        )
        self.memory_plan = plan
        self.limits = Limits(
            block_size=config.block_size,
            max_batch_tokens=config.max_batch_tokens or devices.max_batch_tokens(self.device),
            max_requests=plan.num_slots,
            can_share_blocks=config.allow_block_sharing,
            can_resume_prompts=not self.layout.is_recurrent,
            is_packed=self.batch_layout is BatchLayout.PACKED,
        )
        drafts = "on" if self._has_drafts else "off"
        self._chosen = f"{self._graphs_phrase}{self._compilation}; drafts: {drafts}"
        level = logging.WARNING if self._is_without_graphs else logging.INFO
        _LOGGER.log(level, "%s", self.decode_path)

    def _reset_executor(self) -> None:
        self._executor.reset(self._graphs, self._proposer if self._has_drafts else None)

    @property
    def model(self) -> PreTrainedModel:
        """The model that generates."""
        return self._runner.model

    @property
    def batch_layout(self) -> BatchLayout:
        """Layout of the rows that share a forward."""
        return self._runner.batch_layout

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens, prompt and completion together, of the longest sequence that fits the cache."""
        num_blocks = self.memory_plan.num_blocks
        if self.config.max_blocks_per_request:
            num_blocks = min(num_blocks, self.config.max_blocks_per_request)
        return num_blocks * self.limits.block_size

    @property
    def has_work(self) -> bool:
        """Return whether any sequence is unfinished."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to be admitted."""
        return len(self._scheduler.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a table row."""
        return self._scheduler.num_admitted

    @property
    def num_blocks_used(self) -> int:
        """KV cache blocks in use by unfinished sequences."""
        return self._scheduler.pool.num_used

    @property
    def cache_bytes(self) -> int:
        """Bytes of the allocated keys, values and states."""
        return self._storage.num_bytes

    def add(self, request: Request) -> None:
        """Queue a validated sequence."""
        self._scheduler.add(request)

    def cancel(self, request: Request) -> None:
        """End an unfinished sequence, keeping what it has."""
        request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
        self._scheduler.retire(request)

    def begin_policy_version(self, policy_version: int, keep_keys: bool = False) -> None:
        """Stamp tokens with a new version, and never match a key of an older one.

        Args:
            policy_version: version of the changed weights.
            keep_keys: let running sequences go on with their keys; False: all are computed anew.
        """
        self.policy_version = policy_version
        self._scheduler.begin_policy_version(policy_version, keep_keys)
        is_due = self.training.needs_new_plan and not (keep_keys and self.has_work)
        if self._is_model_changed or is_due:
            self.training.stop_measuring(self.cache_bytes)
            if is_due:
                self.training.settle()
            with devices.plain_modes():
                self._plan_anew()

    def capture_wanted(self) -> None:
        """Capture the CUDA graphs that steps turned out to want; the engine must be paused."""
        if self._graphs is not None and self._graphs.is_wanting:
            self.warm_up()

    def _plan_anew(self) -> None:
        """Plan the memory again, and probe the model first if it changed."""
        is_changed = self._is_model_changed
        if is_changed:
            self._graphs = None
        self.release_cache()
        if is_changed:
            self._probe()
        else:
            self._plan()
        self.release_cache()

    def check_images(self, request: Request) -> None:
        """Refuse a model that differs from its plain forward on a request's images.

        Raises:
            ConfigurationError: it does, or takes no images.
        """
        assert request.images is not None
        with devices.plain_modes():
            try:
                check_images(self._runner, self.layout, request.prompt_ids, request.images)
            except torch.OutOfMemoryError:
                # Beside the cache there was no room; the next step allocates it again.
                self.release_cache()
                check_images(self._runner, self.layout, request.prompt_ids, request.images)
        self.takes_images = True

    def release_cache(self) -> None:
        """Release the cache's memory; unfinished sequences are computed anew afterwards."""
        self._scheduler.reset(self.limits)
        self._storage.release(self.limits, self.memory_plan, self.layout)
        self._reset_executor()

    def recompute(self, request: Request) -> list[float]:
        """Return a sequence's log-probabilities by one plain forward of the model that trains."""
        with eval_mode(self.trained), devices.plain_modes():
            return self._runner.recompute(self.trained, request)

    def step(self) -> list[Request]:
        """Run at most one forward, of prompts or of running sequences.

        Returns:
            The sequences that got a token or ended, each once.
        """
        with devices.current(self.device), devices.plain_modes():
            touched = self._step()
        self._scheduler.retire_running()
        if not self.has_work:
            self.hand_back_model()
        return touched

    def _step(self) -> list[Request]:
        if self._eval_mode is None:
            # The model may have been trained in another stream than this thread's.
            devices.wait_event(self._given, self.device)
            self.training.stop_measuring(self.cache_bytes)
            if self._is_model_changed:
                # A cast does not change the weights, so no sync reported it.
                try:
                    self._plan_anew()
                except RolloutError as error:
                    return self._executor.fail(list(self._scheduler.waiting), error)
            self._eval_mode = ExitStack()
            self._eval_mode.enter_context(eval_mode(self.model))
            self._drop_stale_forwards()
            self._capture_graphs(is_paused=False)
        if not self._storage.is_allocated:
            try:
                self._allocate()
            except OutOfCacheMemoryError as error:
                return self._executor.fail(list(self._scheduler.waiting), error)
        if (touched := self._executor.run()) is not None:
            return touched
        request = self._scheduler.waiting.head
        assert request is not None, "there is work, and none of it can run"
        error = OutOfCacheMemoryError(
            f"{request.num_tokens} tokens do not fit {self._scheduler.pool.num_blocks} KV cache "
            f"blocks of {self.limits.block_size}; raise num_blocks or max_memory_percent.\n"
            f"{self.memory_plan}"
        )
        return self._executor.fail([request], error)

    def _drop_stale_forwards(self) -> None:
        """Drop captured and traced forwards whose weights have moved."""
        if self._graphs is not None:
            self._graphs.check_weights()
        self._runner.check_weights()

    def _capture_graphs(self, *, is_paused: bool) -> None:
        """Capture the graphs that are missing since weights moved or `release_graphs`.

        Args:
            is_paused: capture those too that steps turned out to want. The thread that paused the
                engine is the one that would train meanwhile.
        """
        if self._graphs is None:
            return
        try:
            self._graphs.capture_sizes(self.limits.block_size)
            if is_paused:
                self._graphs.capture_wanted(self.limits.block_size)
        except torch.OutOfMemoryError as error:
            devices.empty_cache(self.device)
            _LOGGER.warning(
                "no memory to capture all CUDA graphs (%s); steps of other sizes are captured as "
                "they come up. Lower max_memory_percent or max_requests_per_batch.",
                error,
            )

    def release_graphs(self) -> None:
        """Drop the CUDA graphs and free their memory; the next step captures them again."""
        if self._graphs is not None:
            self._graphs.forget()
            devices.empty_cache(self.device)

    def warm_up(self) -> None:
        """Trace, compile or capture decode steps before one needs it; no step may be running."""
        with devices.current(self.device), devices.plain_modes():
            if self._is_model_changed:
                self._plan_anew()
            with eval_mode(self.model):
                self._drop_stale_forwards()
                self._runner.warm_up()
                self._capture_graphs(is_paused=True)
                devices.finish(self.device)

    def hand_back_model(self) -> None:
        """Restore the model's training flags, until the next step."""
        if self._eval_mode is not None:
            self._executor.settle()
            self._eval_mode.close()
            self._eval_mode = None
            self.training.start_measuring()

    def lend_model(self) -> None:
        """Hand the model to the calling thread, which paused the engine.

        Its stream follows the engine's work, and that of the last thread that had the model.
        """
        self.hand_back_model()
        devices.wait_event(self._given, self.device)

    def receive_model(self) -> None:
        """Take the model from the calling thread; the next step follows the work of its stream."""
        self._given = devices.record_event(self.device)

    def abandon(self) -> None:
        """Drop every request and the cache."""
        self.hand_back_model()
        self._scheduler.clear()
        self.release_cache()

    def _allocate(self) -> None:
        """Allocate pages for the waiting sequences, within the plan."""
        needed = self._scheduler.num_usable_blocks()
        self._scheduler.pool.grow(self._storage.allocate(sum(needed), at_least=min(needed)))

    def _grow(self, count: int) -> int:
        """Make room for more blocks, as far as plan and work allow; return the total."""
        if (num_blocks := self._scheduler.pool.num_blocks) >= self.memory_plan.num_blocks:
            return num_blocks
        return self._storage.grow(count, usable=sum(self._scheduler.num_usable_blocks()))
