"""Join the engine's parts: plan the memory, step the executor, change policy versions.

Owns the paged cache and the policy version. Called by one thread at a time.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.fsdp import write_state
from cb_rollout.compat.module_state import (
    model_settings,
    module_code,
    watched_tensors,
    with_moved_adapters,
)
from cb_rollout.config.enums import Numerics
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.cuda_graphs import selection
from cb_rollout.engine.cuda_graphs.selection import ExecutionPath, choose_compilation, create_graphs
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.images.check import check_images
from cb_rollout.engine.kv_cache.sizing import (
    gathered_bytes_per_token,
    require_room,
    workspace_bytes_per_request,
)
from cb_rollout.engine.kv_cache.storage import CacheStorage
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import MemoryModel, create_memory_plan
from cb_rollout.engine.memory.training import OptimizerOrName, TrainingMemory
from cb_rollout.engine.model.check import attempt, check_model
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.model.runner import (
    BatchLayout,
    ModelRunner,
    prompt_logprobs,
    recomputed_logprobs,
)
from cb_rollout.engine.model.trained_check import check_trained_model, wrapper_state
from cb_rollout.engine.numerics.agreement import is_measurable
from cb_rollout.engine.numerics.bitwise import bitwise
from cb_rollout.engine.request import Limits, Request
from cb_rollout.engine.sampling.sampler import TokenSampler, keeps_ids, reported_mode
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO, Scheduler
from cb_rollout.errors import OutOfCacheMemoryError, RolloutError, error_text
from cb_rollout.metrics.registry import EngineCounters, EngineStatus
from cb_rollout.types import FinishReason, RequestStatus

_LOGGER = logging.getLogger(__name__)


class Engine:
    """Generates tokens with one model, by continuous batching over a paged cache."""

    _function_seen: tuple[object, ...] | None = None
    """Weights, settings and adapters when this policy version computed last; None: it has not."""
    _warned_of = ""
    """The slower paths that were logged last."""

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

        Forwards run under autocast to `autocast_dtype`, if set. `trained` is the training model
        that `model` is a copy of, and `optimizer` steps it, or names its class. `all_reduce_min`
        returns the least number of the processes that share the model's layers; None: one has all.

        Raises `ConfigurationError` if the model cannot run on pages, or a setting cannot be
        honoured, and `OutOfCacheMemoryError` if not even one block fits.
        """
        self.config, self.counters, self.policy_version = config, EngineCounters(), 0
        is_bitwise, is_split = config.numerics == Numerics.BITWISE, all_reduce_min is not None
        self._all_reduce_min = all_reduce_min or int
        self.runner = ModelRunner(model, autocast_dtype, is_bitwise=is_bitwise, is_split=is_split)
        self._eval_mode: ExitStack | None = None
        self._numerics = ExitStack()
        """Holds the operators of `numerics="bitwise"` while there is work."""
        self.trained = model if trained is None else trained
        own = set(map(id, model.parameters()))
        self.runs_a_copy = own.isdisjoint(map(id, self.trained.parameters()))
        """True where training may change its weights while this engine generates."""
        self.device = self.runner.device
        reserve_gib = config.training_reserve_gib
        self.training = TrainingMemory(self.trained, model, self.device, optimizer, reserve_gib)
        never_sampled = multimodal.never_sampled_token_ids(model)
        with devices.plain_modes(), self._computing():
            self._probe()
        cache = self.layout, self.memory_plan, self.device
        self._storage = CacheStorage(*cache, self._all_reduce_min)
        self._scheduler = Scheduler(
            self.limits, self.counters, self._grow, config.scheduler_type, self._record_routes
        )
        mode, keeps = reported_mode(config), keeps_ids(config)
        sampler = TokenSampler(self.device, mode, self.counters, never_sampled, keeps_ids=keeps)
        parts = self.runner, self._scheduler, self._storage, sampler, self.counters
        self._executor = StepExecutor(*parts, looks_ahead=config.looks_ahead)
        self._executor.reset(self._graphs)
        if self.runs_a_copy and self.device.type == "cuda":
            # Its work does not queue behind that of a thread that trains meanwhile. Pages are
            # allocated and written there alone, so the allocator needs no record of other streams.
            self._executor.stream = torch.cuda.Stream(self.device, priority=-1)
        self._given = devices.record_event(self.device)

    def _probe(self) -> None:
        """Probe the cache's layout, select how decode steps run, and plan the memory."""
        devices.require_unmoved(self.model, self.device)
        identity = self.runner.forward_identity
        self.runner.recorder = None
        # A copy has its adapters merged as they are.
        moved = nullcontext() if self.runs_a_copy else with_moved_adapters(self.trained)
        with moved:
            self.layout = check_model(self.runner)
            check_trained_model(self.runner, self.trained)
            self.runner.packed_linear.forget()
        self._wrappers_checked = wrapper_state(self.trained)
        if self.config.router_replay:
            self.layout = replace(self.layout, routes=self.runner.record_routes().spec)
        # Once for each layout: a later plan may find the trace given up, for other reasons.
        choose_compilation(self.runner, self.config)
        # Anew for another layout: a later check may find more, or less.
        self.runner.cuts_images.clear()
        max_rows = self._max_requests
        if self.layout.is_recurrent:
            # More rows than states fit never run together.
            self._graphs = None
            max_rows = max(1, min(max_rows, create_memory_plan(self._memory_model()).num_slots))
        # Captured before the memory is planned, which then knows what is left.
        self._graphs, self._graphs_path = create_graphs(
            self.runner, self.config, max_rows, is_alone=not self.runner.is_split
        )
        self._plan()
        self._identity = identity

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a training model that was wrapped anew, and check what its forward computes.

        A copy is checked at its next sync.
        """
        self.trained = trained
        # A copy has the weights of the last sync: it is compared after the next.
        if not self.runs_a_copy:
            self._check_wrappers()

    def _check_wrappers(self) -> None:
        """Check the training model's own forward again if one of its wrappers changed."""
        state = wrapper_state(self.trained)
        if state == self._wrappers_checked:
            return
        moved = nullcontext() if self.runs_a_copy else with_moved_adapters(self.trained)
        with devices.plain_modes(), self._computing(), moved:
            check_trained_model(self.runner, self.trained)
            self.runner.packed_linear.forget()
        self._wrappers_checked = state

    @property
    def _max_requests(self) -> int:
        return self.config.max_requests_per_batch or devices.max_requests_per_batch(self.device)

    @property
    def paths(self) -> list[ExecutionPath]:
        """Return how prefill and decode steps run at present, part by part."""
        runner, graphs, selected = self.runner, self._graphs_path, self.runner.backend_selection
        prefill, obstacle = str(self.runner.batch_layout), runner.packing_obstacle
        paths = [ExecutionPath("prefill", prefill + ", not packed" * bool(obstacle), obstacle)]
        if (backend := runner.attention_backend) is None:
            paths.append(ExecutionPath("decode attention", selected.name, selected.reason))
        else:
            paths.append(ExecutionPath("decode attention", f"{selected.name} ({selected.reason})"))
            forward = backend.traced_forward
            paths.append(ExecutionPath("forwards", str(forward), forward.obstacle))
        if self._graphs is not None and (now := self._graphs.obstacle):
            graphs = graphs._replace(obstacle=f"not {now}")
        return [*paths, graphs]

    @property
    def decode_path(self) -> str:
        return "; ".join(map(str, self.paths[1:]))

    def _warn_of_slower_paths(self) -> None:
        """Say what a GPU could run better, in one warning, unless that was said last."""
        slower = "; ".join(str(path) for path in self.paths if path.obstacle)
        is_news = slower not in ("", self._warned_of)
        if is_news and selection.graph_obstacle(self.device) is None:
            _LOGGER.warning("rollouts would be faster by other paths: %s", slower)
        self._warned_of = slower

    @property
    def _is_model_changed(self) -> bool:
        return self.runner.forward_identity != self._identity

    def _plan(self) -> None:
        """Divide the free memory; no cache may be allocated."""
        config = self.config
        plan = require_room(create_memory_plan(self._memory_model()), config, self.device)
        # Every process of a group must admit and preempt the same sequences.
        num_blocks, num_slots = map(self._all_reduce_min, (plan.num_blocks, plan.num_slots))
        self.memory_plan = plan = replace(plan, num_blocks=num_blocks, num_slots=num_slots)
        self.limits = Limits(
            block_size=config.block_size,
            max_batch_tokens=plan.max_batch_tokens,
            max_requests=plan.num_slots,
            can_share_blocks=config.allow_block_sharing,
            can_resume_prompts=not self.layout.is_recurrent,
            is_packed=self.runner.batch_layout is BatchLayout.PACKED,
            rope_limits=self.runner.rope.limits,
        )
        _LOGGER.info("%s", self.decode_path)
        self._warn_of_slower_paths()

    def _memory_model(self) -> MemoryModel:
        config, layout, graphs, device = self.config, self.layout, self._graphs, self.device
        training, memory = self.training.bytes_now(), devices.memory_after_release(device)
        graph_bytes, captured = (graphs.planned_bytes, graphs.num_bytes) if graphs else (0, 0)
        free = max(0, memory.free_bytes - (graph_bytes - captured))
        model, dtype = self.model, self.runner.compute_dtype
        num_heads = hf_compat.num_query_heads(model)
        # With a backend, decode steps gather nothing.
        gathers_always = self.runner.attention_backend is None
        return MemoryModel(
            total_bytes=memory.total_bytes,
            free_bytes=free,
            training=training,
            max_memory_percent=config.max_memory_percent,
            block_size=config.block_size,
            max_requests=self._max_requests,
            max_batch_tokens=config.max_batch_tokens or devices.max_batch_tokens(device),
            max_blocks_per_request=config.max_blocks_per_request,
            bytes_per_token=layout.bytes_per_token,
            bytes_per_sequence=layout.bytes_per_sequence,
            workspace_bytes_per_request=workspace_bytes_per_request(hf_compat.vocab_size(model)),
            gathered_bytes_per_token=gathered_bytes_per_token(layout, num_heads, dtype),
            history_factor=1 if layout.is_recurrent else MAX_GATHER_RATIO,
            max_sequence_tokens=None if gathers_always else hf_compat.max_positions(model),
            graph_bytes=graph_bytes,
            packed_weight_bytes=self.runner.packed_linear.plan(free - training.reserve, dtype),
            set_blocks=config.num_blocks,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.runner.model

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens, prompt and completion together, of the longest sequence that fits the cache."""
        num_blocks = self.memory_plan.num_blocks
        num_blocks = min(num_blocks, self.config.max_blocks_per_request or num_blocks)
        return num_blocks * self.limits.block_size

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_blocks_used(self) -> int:
        return self._scheduler.pool.num_used

    @property
    def cache_bytes(self) -> int:
        return self._storage.num_bytes

    def status(self) -> EngineStatus:
        """Return the engine's state now."""
        return EngineStatus(
            requests_running=self._scheduler.num_admitted,
            requests_waiting=self.num_waiting,
            kv_blocks_used=self.num_blocks_used,
            kv_blocks=self.memory_plan.num_blocks,
            kv_bytes=self.cache_bytes,
            policy_version=self.policy_version,
        )

    def add(self, request: Request) -> None:
        if request.images is not None:
            request.images.may_be_cut = self.runner.cuts_images.get(request.images.kind, False)
        self._scheduler.add(request)

    @property
    def routers(self) -> Routers | None:
        """Routers of the model, whose choices are recorded; None: none are."""
        recorder = self.runner.recorder
        return None if recorder is None else recorder.routers

    def _record_routes(self, request: Request) -> None:
        """Have a sequence that loses its blocks keep the experts that its tokens took."""
        if self.routers is None or not self._storage.is_allocated or not request.num_generated:
            return
        positions, size = torch.arange(request.num_computed), self.limits.block_size
        slots = torch.tensor(request.block_ids)[positions // size] * size + positions % size
        routes = self._storage.cache.read_routes(devices.moved(slots, self.device))
        new, old = routes.cpu().numpy(), request.routed_experts
        request.routed_experts = new if old is None else np.concatenate([old, new[len(old) :]])

    def cancel(self, request: Request) -> None:
        request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
        self._scheduler.retire(request)

    def begin_policy_version(self, policy_version: int, keep_keys: bool = False) -> None:
        """Stamp tokens with a new version, and never match a key of an older one.

        With `keep_keys` running sequences go on with their keys, else all are computed again.
        """
        self._forget_keys(policy_version, keep_keys)
        self._check_wrappers()
        is_due = self.training.needs_new_plan and not (keep_keys and self.has_work)
        is_due = bool(self._all_reduce_min(is_due))
        if self._is_model_changed or is_due:
            self.training.stop_measuring(self.cache_bytes)
            if is_due:
                self.training.settle()
            with devices.plain_modes(), self._computing():
                self._plan_anew()

    def _forget_keys(self, policy_version: int, keep_keys: bool = False) -> None:
        self.policy_version = policy_version
        self._function_seen = None
        self.runner.packed_linear.forget()
        self._scheduler.begin_policy_version(policy_version, keep_keys)

    def _notice_changed_function(self) -> None:
        """Begin a policy version where the training module computes something else than before.

        A write to a weight or a buffer changes it, and so do a setting and the active adapters.
        """
        if self.runs_a_copy:
            return
        seen = self._function_seen
        writes = [write_state(tensor) for tensor in watched_tensors(self.model)]
        settings = model_settings(self.model)
        code = module_code(self.model)
        now = (self.training.num_steps, writes, settings, code)
        if seen is not None and seen != now:
            self._forget_keys(self.policy_version + 1)
            _LOGGER.warning(
                "the weights, settings or active adapters changed without sync_weights() or "
                "pause(): policy version %d begins here; call sync_weights() after each change",
                self.policy_version,
            )
        self._function_seen = now

    def capture_wanted(self) -> None:
        """Capture the CUDA graphs that steps turned out to want; the engine must be paused."""
        if self._graphs is not None and self._graphs.is_wanting:
            self.warm_up()

    def _plan_anew(self) -> None:
        plan = self._plan
        if self._is_model_changed:
            self._graphs, plan = None, self._probe
        self.release_cache()
        plan()
        self.release_cache()

    def check_images(self, request: Request) -> None:
        """Raise `ConfigurationError` if the model takes no images, or computes them differently."""
        assert request.images is not None
        arguments = self.runner, self.layout, request.prompt_ids, request.images
        with devices.plain_modes(), self._computing():
            try:
                check_images(*arguments)
            except torch.OutOfMemoryError:
                # Beside the cache there was no room; the next step allocates it again.
                self.release_cache()
                check_images(*arguments)

    def release_cache(self) -> None:
        """Release the cache's memory; unfinished sequences are computed anew afterwards."""
        self.runner.packed_linear.forget()
        self._scheduler.reset(self.limits)
        self._storage.release(self.layout, self.memory_plan)
        self._executor.reset(self._graphs)

    def recompute(self, request: Request) -> list[float]:
        """Return a sequence's log-probabilities by one plain forward of the model that trains."""
        with eval_mode(self.trained), devices.plain_modes(), self._computing():
            return recomputed_logprobs(self.runner, self.trained, request)

    def prompt_logprobs(
        self, token_ids: list[int], temperature: float, num: int
    ) -> list[dict[int, tuple[float, int]]]:
        with eval_mode(self.model), devices.plain_modes(), self._computing():
            return prompt_logprobs(self.runner, token_ids, temperature, num)

    def recompute_precisely(self, request: Request) -> list[float] | None:
        """Return the same in a higher precision; None: it cannot, or takes long on this device."""
        runner = self.runner
        is_coarse = runner.computes_coarsely
        is_quick = is_coarse or is_measurable(runner.model, request.num_tokens)
        if not is_quick or runner.is_bitwise or runner.is_split:
            return None
        with runner.computing_in(torch.float32 if is_coarse else torch.float64):
            return attempt(lambda: self.recompute(request))[0]

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
        if self._eval_mode is None:
            # The model may have been trained in another stream than this thread's.
            devices.wait_event(self._given, self.device)
            self.training.stop_measuring(self.cache_bytes)
            self._numerics.enter_context(self._computing())
            try:
                # A cast does not change the weights, so no sync reported it.
                if self._is_model_changed:
                    self._plan_anew()
            except RolloutError as error:
                return self._executor.fail(list(self._scheduler.waiting), error)
            self._notice_changed_function()
            self._eval_mode = ExitStack()
            self._eval_mode.enter_context(eval_mode(self.model))
            self._drop_stale_forwards()
            self._capture_graphs(is_paused=False)
        if not self._storage.is_allocated:
            try:
                needed = self._scheduler.num_usable_blocks()
                num_blocks = self._storage.allocate(sum(needed), at_least=min(needed))
                self._scheduler.pool.grow(num_blocks)
            except OutOfCacheMemoryError as error:
                return self._executor.fail(list(self._scheduler.waiting), error)
        if (touched := self._executor.run()) is not None:
            return touched
        request = self._scheduler.next_waiting
        assert request is not None, "there is work, and none of it can run"
        error = OutOfCacheMemoryError(
            f"{request.num_tokens} tokens do not fit {self._scheduler.pool.num_blocks} KV cache "
            f"blocks of {self.limits.block_size}; raise num_blocks or max_memory_percent.\n"
            f"{self.memory_plan}"
        )
        return self._executor.fail([request], error)

    def _computing(self) -> AbstractContextManager[None]:
        is_bitwise = self.config.numerics == Numerics.BITWISE
        return bitwise(self.model) if is_bitwise else nullcontext()

    def _drop_stale_forwards(self) -> None:
        if self._graphs is not None:
            self._graphs.check_weights()
        self.runner.check_weights()

    def _capture_graphs(self, *, is_paused: bool) -> None:
        """Capture the graphs that are missing; if `is_paused`, those too that steps want."""
        if self._graphs is None:
            return
        try:
            if self._graphs.is_dropped or is_paused:
                self._graphs.capture_sizes(self.limits.block_size)
            if is_paused:
                self._graphs.capture_wanted(self.limits.block_size)
        except torch.OutOfMemoryError as error:
            devices.empty_cache(self.device)
            _LOGGER.warning(
                "no memory to capture all CUDA graphs (%s); other steps run the graph of more "
                "rows, or none. Lower max_memory_percent or max_requests_per_batch.",
                error,
            )
        except Exception as error:  # noqa: BLE001  kernels run what cannot be captured
            self._graphs.give_up(f"now, since capturing the forward failed ({error_text(error)})")
            devices.empty_cache(self.device)
        self._warn_of_slower_paths()

    def release_graphs(self) -> None:
        """Drop the CUDA graphs and free their memory, until `capture_released`."""
        if self._graphs is not None:
            self._graphs.release()
            devices.empty_cache(self.device)

    def capture_released(self) -> None:
        """Capture the CUDA graphs that `release_graphs` dropped; the engine must be paused."""
        # A model that was changed meanwhile is left to the next step, which probes it first.
        if self._graphs is not None and self._graphs.is_dropped and not self._is_model_changed:
            self.warm_up()

    def warm_up(self, num_steps: float = 0) -> None:
        """Trace, compile or capture decode steps before a step needs it; no step may be running.

        A CPU's steps are compiled where that pays off in `num_steps`.
        """
        with devices.current(self.device), devices.plain_modes(), self._computing():
            if self._is_model_changed:
                self._plan_anew()
            with eval_mode(self.model):
                self._drop_stale_forwards()
                self.runner.warm_up(num_steps)
                self._capture_graphs(is_paused=True)
                devices.finish(self.device)

    def release_model(self) -> None:
        """Restore the model's training flags, until the next step."""
        with self._numerics:
            if self._eval_mode is None:
                return
            eval_mode, self._eval_mode = self._eval_mode, None
            with eval_mode:
                self._executor.settle()
            self.training.start_measuring()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the model to the thread that paused the engine; each waits for the other's work."""
        self.release_model()
        devices.wait_event(self._given, self.device)
        try:
            yield
        finally:
            self._given = devices.record_event(self.device)

    def abandon(self) -> None:
        # A failed device may refuse any of them, and the others must be done regardless.
        with ExitStack() as last:
            last.callback(self.release_cache)
            last.callback(self._scheduler.clear)
            self.release_model()

    def _grow(self, count: int) -> int:
        """Make room for more blocks, as far as plan and work allow; return the total."""
        if (num_blocks := self._scheduler.pool.num_blocks) >= self.memory_plan.num_blocks:
            return num_blocks
        return self._storage.grow(count, usable=sum(self._scheduler.num_usable_blocks()))
