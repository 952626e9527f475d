"""Plan an engine's memory: KV blocks, table rows, and the sizes of forwards.

Allocates nothing. Called when an engine is made, when its model changes, and after the first
measured training step.
"""

from collections.abc import Callable
from dataclasses import replace

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.decode.path import DecodePath
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.offloading import create_host_budget
from cb_rollout.engine.kv_cache.sizing import create_memory_model, require_room
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import MemoryModel, MemoryPlan, create_memory_plan
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.request import Limits
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO


class CachePlanner:
    """Divides a device's free memory between training, forwards and the KV cache.

    Also decides how many sequences may run together, and how much host memory holds the keys of
    preempted sequences.
    """

    def __init__(
        self,
        config: RolloutConfig,
        runner: ModelRunner,
        training: TrainingMemory,
        all_reduce_min: Callable[[int], int],
    ) -> None:
        """Plan nothing yet.

        Args:
            config: the engine's settings.
            runner: runs the model's forwards.
            training: estimates what training holds, and what it will allocate.
            all_reduce_min: takes a number, and returns the smallest over all processes that share
                the model's layers. Each of these processes must call it.
        """
        self._config = config
        self._runner = runner
        self._training = training
        self._all_reduce_min = all_reduce_min
        self._device = runner.device
        asked = config.max_requests_per_batch
        self._max_requests = asked or devices.max_requests_per_batch(self._device)
        host_budget = create_host_budget(config, self._device)
        self._host_budget = host_budget.all_reduced(all_reduce_min)

    def max_rows(self, layout: CacheLayout, decode_path: DecodePath) -> int:
        """Return the most sequences that can run together, before the decode path is chosen.

        Args:
            layout: what the model's layers store.
            decode_path: the current path, which holds memory.
        """
        if not layout.is_recurrent:
            return self._max_requests
        # No more rows run together than there is room for recurrent states.
        plan = create_memory_plan(self._memory_model(layout, decode_path))
        return max(1, min(self._max_requests, plan.num_slots))

    def plan(self, layout: CacheLayout, decode_path: DecodePath) -> MemoryPlan:
        """Divide the free memory; no cache may be allocated.

        Args:
            layout: what the model's layers store.
            decode_path: runs decode steps, and holds memory in addition to the cache.

        Raises:
            OutOfCacheMemoryError: there is no room for one block, or for one sequence's states.
            ConfigurationError: `num_blocks` is more than the device has memory for.
        """
        model = self._memory_model(layout, decode_path)
        plan = require_room(create_memory_plan(model), self._config, self._device)
        # Every process of a group must admit and preempt the same sequences.
        return replace(
            plan,
            num_blocks=self._all_reduce_min(plan.num_blocks),
            num_slots=self._all_reduce_min(plan.num_slots),
            offload_bytes=self._host_budget.num_bytes,
            offload_obstacle=self._host_budget.obstacle,
        )

    def limits(self, plan: MemoryPlan, layout: CacheLayout) -> Limits:
        """Return the sizes that a scheduler may use under a plan."""
        config = self._config
        max_used_blocks = None
        if config.safety_margin is not None:
            max_used_blocks = int(plan.num_blocks * (1 - config.safety_margin))
        return Limits(
            block_size=config.block_size,
            max_batch_tokens=plan.max_batch_tokens,
            max_requests=plan.num_slots,
            can_share_blocks=config.allow_block_sharing,
            can_resume_prompts=not layout.is_recurrent,
            is_packed=self._runner.batch_layout is BatchLayout.PACKED,
            rope_limits=self._runner.rope.limits,
            max_used_blocks=max_used_blocks,
        )

    def _memory_model(self, layout: CacheLayout, decode_path: DecodePath) -> MemoryModel:
        runner = self._runner
        training = self._training.bytes_now()
        memory = devices.memory_after_release(self._device)
        # A path that released its memory will need it again.
        released_bytes = decode_path.planned_bytes - decode_path.num_bytes
        memory = memory._replace(free_bytes=max(0, memory.free_bytes - released_bytes))
        return create_memory_model(
            self._config,
            layout,
            runner.model,
            compute_dtype=runner.compute_dtype,
            device=self._device,
            memory=memory,
            training=training,
            max_requests=self._max_requests,
            max_gather_ratio=MAX_GATHER_RATIO,
            # With a backend, decode steps gather nothing.
            gathers_always=runner.attention_backend is None,
            path_bytes=decode_path.planned_bytes,
        )
