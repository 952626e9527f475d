"""Join the engine's parts: step the executor, allocate the cache, change policy versions.

Owns the paged cache and the policy version. Called by one thread at a time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.config.enums import Numerics
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.core.paged_model import PagedModel
from cb_rollout.engine.core.planner import CachePlanner
from cb_rollout.engine.core.request_checks import RequestChecks
from cb_rollout.engine.cuda_graphs.qualification import qualified
from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.kv_cache.offloading import KVOffloader
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.training import OptimizerOrName, TrainingMemory
from cb_rollout.engine.model.lease import ModelLease
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.model.training_model import TrainingModel
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.sampler import TokenSampler, keeps_ids, reported_mode
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.errors import OutOfCacheMemoryError, RolloutError
from cb_rollout.metrics.registry import EngineCounters, EngineStatus
from cb_rollout.types import FinishReason, RequestStatus

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Generates tokens with one model, by continuous batching over a paged cache.

    Its parts do the work: `paged_model` runs the model, the planner divides the memory, the
    scheduler chooses sequences, the storage holds their keys, and the executor runs steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: RolloutConfig,
        autocast_dtype: torch.dtype | None = None,
        trained: torch.nn.Module | None = None,
        optimizer: OptimizerOrName | None = None,
        *,
        all_reduce_min: Callable[[int], int] | None = None,
    ) -> None:
        """Probe the model and plan the memory; pages are allocated at the first step.

        Args:
            model: generates; unwrapped, on its device.
            config: the settings.
            autocast_dtype: dtype to autocast forwards to; None: no autocast.
            trained: the training model that `model` is a copy of, or its wrapper; None: `model`.
            optimizer: the optimizer of `trained`, its class, or its name; None: not known.
            all_reduce_min: returns the minimum of a number over the processes that share the
                model's layers; None: one process has all layers.

        Raises:
            ConfigurationError: the model cannot run on pages, or a setting cannot be honoured.
            OutOfCacheMemoryError: not even one block fits.
        """
        config = qualified(model, config, autocast_dtype)
        self.config = config
        self.model = model
        self.model_name = str(getattr(model.config, "name_or_path", "") or "")
        """The checkpoint that the model's config names; empty where it names none."""
        self.counters = EngineCounters()
        self.policy_version = 0
        self._all_reduce_min = all_reduce_min or int
        self.runner = ModelRunner(
            model,
            autocast_dtype,
            is_bitwise=config.numerics == Numerics.BITWISE,
            is_split=all_reduce_min is not None,
            reads_pages=config.max_blocks_per_request != 0,
        )
        self.device = self.runner.device
        module = model if trained is None else trained
        self.training_model = TrainingModel(module, self.runner)
        self.training = TrainingMemory(
            module, model, self.device, optimizer, config.training_reserve_gib
        )
        self.paged_model = PagedModel(self.runner, config)
        self.request_checks = RequestChecks(
            self.paged_model, self.training_model, self.release_cache
        )
        self._planner = CachePlanner(config, self.runner, self.training, self._all_reduce_min)
        with self.runner.computing():
            self._probe()
        self._storage = CacheStorage(
            self.paged_model.layout, self.memory_plan, self.device, self._all_reduce_min
        )
        offload_bytes = self.memory_plan.offload_bytes
        self._offloader = None
        if offload_bytes:
            self._offloader = KVOffloader(self._storage, offload_bytes, self._all_reduce_min)
        self._scheduler = Scheduler(
            self.limits,
            self.counters,
            self._grow,
            config.scheduler_type,
            before_release=self._storage.keep_routes,
            offloader=self._offloader,
        )
        self._executor = StepExecutor(
            self._create_context(),
            self.paged_model.decode_path,
            _create_stream(self.device, is_copied=self.training_model.is_copied),
        )
        self._lease = ModelLease(model, self.device, self.runner.numerics)

    def _create_context(self) -> StepContext:
        token_sampler = TokenSampler(
            self.device,
            reported_mode(self.config),
            self.counters,
            multimodal.never_sampled_token_ids(self.model),
            keeps_ids=keeps_ids(self.config),
        )
        return StepContext(
            runner=self.runner,
            scheduler=self._scheduler,
            storage=self._storage,
            token_sampler=token_sampler,
            counters=self.counters,
        )

    def _probe(self) -> None:
        """Check the model on pages, choose how decode steps run, and plan the memory."""
        paged_model = self.paged_model
        identity = paged_model.check(self.training_model)
        self.request_checks.forget()
        self.runner.mixing.forget()
        paged_model.drop_decode_path()
        max_rows = self._planner.max_rows(paged_model.layout, paged_model.decode_path)
        # Before the memory is planned, since a path may hold some of it.
        paged_model.choose_decode_path(max_rows)
        self._plan()
        # Last, so that after a failure the next step probes again.
        paged_model.accept(identity)

    def _plan(self) -> None:
        """Divide the free memory; the cache must not be allocated yet."""
        paged_model = self.paged_model
        self.memory_plan = self._planner.plan(paged_model.layout, paged_model.decode_path)
        self.limits = self._planner.limits(self.memory_plan, paged_model.layout)
        self.bytes_per_block = self.memory_plan.bytes_per_block
        """Bytes of the keys and values of one KV block."""
        _LOGGER.info("%s", paged_model.describe_decoding())
        paged_model.warn_of_slower_paths()

    def _plan_anew(self) -> None:
        """Plan the memory again, and check the model again if it changed."""
        is_changed = self.paged_model.is_changed
        if is_changed:
            # Free its memory before the next path is created.
            self.paged_model.drop_decode_path()
        self.release_cache()
        if is_changed:
            self._probe()
        else:
            self._plan()
        self.release_cache()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_blocks_used(self) -> int:
        return self._scheduler.pool.num_used

    def status(self) -> EngineStatus:
        """Return the engine's state now."""
        return EngineStatus(
            requests_running=self._scheduler.num_admitted,
            requests_waiting=len(self._scheduler.waiting),
            kv_blocks_used=self.num_blocks_used,
            kv_blocks=self.memory_plan.num_blocks,
            kv_bytes=self._storage.num_bytes,
            policy_version=self.policy_version,
            host_kv_bytes=0 if self._offloader is None else self._offloader.num_bytes,
        )

    def add(self, request: Request) -> None:
        if request.images is not None:
            request.images.may_be_cut = self.request_checks.images.may_cut(request.images)
        self._scheduler.add(request)

    def scheduled(self) -> list[Request]:
        """Return the unfinished sequences, in the order in which they would run again."""
        return self._scheduler.scheduled()

    def keep_routes(self, request: Request) -> None:
        """Store the recorded experts of a sequence's tokens in its request."""
        self._storage.keep_routes(request)

    def cancel(self, request: Request) -> None:
        request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
        self._scheduler.retire(request)

    def begin_policy_version(self, policy_version: int, keep_keys: bool = False) -> None:
        """Start a new policy version; cached keys of older versions are never matched again.

        With `keep_keys`, running sequences keep their keys; otherwise their keys are recomputed.
        """
        self._forget_keys(policy_version, keep_keys)
        self.training_model.forget_function()
        self.training_model.check_wrappers()
        is_due = self.training.needs_new_plan and not (keep_keys and self.has_work)
        is_due = bool(self._all_reduce_min(is_due))
        if self.paged_model.is_changed or is_due:
            self.training.stop_measuring(self._storage.num_bytes)
            if is_due:
                self.training.settle()
            with self.runner.computing():
                self._plan_anew()

    def _forget_keys(self, policy_version: int, keep_keys: bool = False) -> None:
        self.policy_version = policy_version
        self.request_checks.forget_deleted_adapters()
        self.runner.compare_trace()
        self._scheduler.begin_policy_version(policy_version, keep_keys)

    def _notice_changed_function(self) -> None:
        """Begin a policy version if the model computes something different than before."""
        if self.training_model.has_changed(self.training.num_steps):
            self._forget_keys(self.policy_version + 1)
            _LOGGER.warning(
                "the weights, settings or active adapters changed without sync_weights() or "
                "pause(): policy version %d begins here; call sync_weights() after each change",
                self.policy_version,
            )

    def release_cache(self) -> None:
        """Release the cache's memory; the keys of unfinished sequences are recomputed later."""
        self._scheduler.reset(self.limits)
        self._storage.release(self.paged_model.layout, self.memory_plan)
        self._executor.reset(self.paged_model.decode_path)

    def step(self) -> list[Request]:
        """Run at most one forward; return the sequences that got a token or ended, each once."""
        stream = self._executor.stream
        with devices.current(self.device), devices.on_stream(stream), devices.plain_modes():
            touched = self._step()
        self._scheduler.retire_running()
        if not self.has_work:
            self.release_model()
        return touched

    def _step(self) -> list[Request]:
        if not self._lease.is_held:
            self._lease.begin()
            self.training.stop_measuring(self._storage.num_bytes)
            try:
                # A cast does not change the weights, so no sync reported it.
                if self.paged_model.is_changed:
                    self._plan_anew()
            except RolloutError as error:
                return self._executor.fail(list(self._scheduler.waiting), error)
            self._notice_changed_function()
            self._lease.hold()
            self.paged_model.begin()
        if not self._storage.is_allocated:
            try:
                self._allocate()
            except OutOfCacheMemoryError as error:
                return self._executor.fail(list(self._scheduler.waiting), error)
        touched = self._executor.run()
        if touched is not None:
            return touched
        request = self._scheduler.next_waiting
        assert request is not None, "there is work, and none of it can run"
        error = OutOfCacheMemoryError(
            f"{request.num_tokens} tokens do not fit {self._scheduler.pool.num_blocks} KV cache "
            f"blocks of {self.limits.block_size}; raise num_blocks or max_memory_percent.\n"
            f"{self.memory_plan}"
        )
        return self._executor.fail([request], error)

    def _allocate(self) -> None:
        """Allocate the cache for the waiting sequences; raise if not even one fits."""
        needed = self._scheduler.num_usable_blocks()
        num_blocks = self._storage.allocate(sum(needed), at_least=min(needed))
        self._scheduler.pool.grow(num_blocks)

    def _grow(self, count: int) -> int:
        """Grow the cache as far as the plan allows and the work needs; return the total blocks."""
        num_blocks = self._scheduler.pool.num_blocks
        if num_blocks >= self.memory_plan.num_blocks:
            return num_blocks
        return self._storage.grow(count, usable=sum(self._scheduler.num_usable_blocks()))

    def warm_up(self, num_steps: float = 0) -> None:
        """Trace, compile or capture decode steps ahead of time; no step may be running.

        On a CPU, steps are compiled if that pays off within `num_steps`.
        """
        if self.paged_model.is_changed:
            with self.runner.computing():
                self._plan_anew()
        self.paged_model.warm_up(num_steps)

    def release_model(self) -> None:
        """Restore the model's training flags, until the next step."""
        was_held = self._lease.release(self._executor.settle)
        if was_held:
            self.training.start_measuring()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the model to the pausing thread; on a GPU, the streams wait for each other."""
        self.release_model()
        with self._lease.lent():
            yield

    def abandon(self) -> None:
        # A failed device may raise in any of these calls, and the others must still run.
        with ExitStack() as last:
            last.callback(self.release_cache)
            last.callback(self._scheduler.clear)
            self.release_model()


def _create_stream(device: torch.device, *, is_copied: bool) -> torch.cuda.Stream | None:
    """Return a separate CUDA stream for a copy; None: use the stepping thread's stream."""
    if is_copied and device.type == "cuda":
        # The copy's work must not queue behind a thread that trains meanwhile. Pages are allocated
        # and written only on this stream, so the allocator needs no record of other streams.
        return torch.cuda.Stream(device, priority=-1)
    return None
