"""How much memory the KV cache may take. Arithmetic only; what a device reports is passed in."""

from dataclasses import dataclass
from typing import NamedTuple

GIB = 1024**3

STATES_DIVISOR = 2
# Where a model keeps recurrent states and keys, states take half the budget at most: neither
# starves the other.


class Part(NamedTuple):
    """One row of a plan's table."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """What training holds of a device's memory, and what it will still take. All in bytes."""

    weights: int = 0
    """Of the model that trains, and of the copy that generates where there is one."""
    gradients: int = 0
    """That exist now."""
    optimizer_states: int = 0
    """That exist now and are known."""
    gradients_to_come: int = 0
    """Estimated, before the first optimizer step."""
    optimizer_states_to_come: int = 0
    """Estimated, before the first optimizer step."""
    activations: int = 0
    """Measured: the most that training took beyond what it holds, while the cache was held too.
    Gradients that come and go are part of it."""
    is_measured: bool = False
    """Whether a full optimizer step was measured."""
    set_reserve: int | None = None
    """`training_reserve_gib`, which replaces all estimates and measures; None: "auto"."""

    @property
    def reserve(self) -> int:
        """What training will still allocate."""
        if self.set_reserve is not None:
            return self.set_reserve
        return self.gradients_to_come + self.optimizer_states_to_come + self.activations

    @property
    def held(self) -> int:
        """What training holds now."""
        return self.weights + self.gradients + self.optimizer_states

    @property
    def parts(self) -> list[Part]:
        """What is held and what is to come."""
        if self.set_reserve is not None:
            return [
                Part("weights", self.weights),
                Part("gradients", self.gradients, "now"),
                Part("optimizer states", self.optimizer_states, "now"),
                Part("training reserve", self.set_reserve, "training_reserve_gib"),
            ]
        states_to_come = self.optimizer_states_to_come
        return [
            Part("weights", self.weights),
            Part(
                "gradients", self.gradients + self.gradients_to_come, _come(self.gradients_to_come)
            ),
            Part("optimizer states", self.optimizer_states + states_to_come, _come(states_to_come)),
            Part(
                "activations peak",
                self.activations,
                "measured beside the cache" if self.is_measured else "not measured yet",
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the KV cache may take, and how that follows. Prints as a table. All in bytes."""

    total_bytes: int
    """What the device has, or what this process may have of it."""
    free_bytes: int
    """Free on the device when the plan was made; this process's share, where several plan alike."""
    training: TrainingBytes
    """What training holds and will still allocate."""
    max_memory_percent: float
    """Share of the rest that the cache may take."""
    workspace_bytes: int
    """What a forward of the largest batch takes, whatever is cached."""
    workspace_bytes_per_block: int
    """What a forward takes for each block that it reads."""
    graph_bytes: int
    """What CUDA graphs take; 0 where there are none."""
    bytes_per_block: int
    """Keys and values of one block, over all layers."""
    bytes_per_sequence: int
    """Recurrent states of one sequence, over all layers; 0 where the model keeps none."""
    num_slots: int
    """Sequences decoded together at most; their states are taken from the budget first."""
    num_blocks: int
    """Blocks that the cache may grow to."""
    is_fixed: bool = False
    """Whether `num_blocks` was set, rather than derived from the budget."""

    @property
    def training_reserve_bytes(self) -> int:
        """What training will still allocate."""
        return self.training.reserve

    @property
    def budget_bytes(self) -> int:
        """What `max_memory_percent` allows."""
        return _budget(self.free_bytes - self.training.reserve, self.max_memory_percent)

    @property
    def state_bytes(self) -> int:
        """What the recurrent states of all slots take."""
        return self.num_slots * self.bytes_per_sequence

    @property
    def kv_bytes(self) -> int:
        """What `num_blocks` blocks take."""
        return self.num_blocks * self.bytes_per_block

    @property
    def forward_bytes(self) -> int:
        """What a forward takes, at most, that reads all blocks."""
        return self.workspace_bytes + self.num_blocks * self.workspace_bytes_per_block

    @property
    def left_bytes(self) -> int:
        """What nobody has a claim on; negative where more is claimed than there is."""
        claimed = self.training.reserve + self.forward_bytes + self.graph_bytes
        return self.free_bytes - claimed - self.state_bytes - self.kv_bytes

    @property
    def parts(self) -> list[Part]:
        """Who has, or may have, which part of the total; they add up to it."""
        budget = f"{self.max_memory_percent:.0%} of what training leaves"
        how = "num_blocks" if self.is_fixed else budget
        left = self.left_bytes
        return [
            Part("used otherwise", self.total_bytes - self.free_bytes - self.training.held),
            *self.training.parts,
            Part("forward workspace", self.forward_bytes),
            Part("CUDA graphs", self.graph_bytes, "" if self.graph_bytes else "none"),
            Part("recurrent states", self.state_bytes, f"{self.num_slots} sequences"),
            Part("KV cache", self.kv_bytes, f"{self.num_blocks} blocks at most, {how}"),
            Part("free", left, "more is claimed than there is" if left < 0 else ""),
        ]

    def __str__(self) -> str:
        """The plan as a table."""
        rows = [Part("total", self.total_bytes), *self.parts]
        return "\n".join(
            f"{name:<18}{size / GIB:>11.3f} GiB  {note}".rstrip() for name, size, note in rows
        )


def create_memory_plan(
    *,
    total_bytes: int,
    free_bytes: int,
    training: TrainingBytes,
    max_memory_percent: float,
    workspace_bytes: int,
    workspace_bytes_per_block: int,
    graph_bytes: int = 0,
    bytes_per_block: int,
    bytes_per_sequence: int,
    max_requests: int,
    num_blocks: int | None,
) -> MemoryPlan:
    """Divide the free memory: budget = share x (free - reserve), rounded down to blocks.

    States and blocks stay within the budget, and leave a forward its workspace.

    Args:
        total_bytes: what the device has.
        free_bytes: what of it this process may still take.
        training: what training holds and will take, kept out of the budget.
        max_memory_percent: the share, in (0, 1].
        workspace_bytes: what a forward of the largest batch takes, whatever is cached.
        workspace_bytes_per_block: what a forward takes for each block that it reads.
        graph_bytes: what CUDA graphs take.
        bytes_per_block: 0 for a model that keeps no keys.
        bytes_per_sequence: fixed-size states of one sequence.
        max_requests: most slots; fewer where their states would not fit their share of the budget.
        num_blocks: fixed by the user; None: derived.
    """
    rest = max(0, free_bytes - training.reserve)
    budget = _budget(rest, max_memory_percent)
    after_forward = max(0, rest - workspace_bytes - graph_bytes)
    num_slots, states = max_requests, 0
    if bytes_per_sequence:
        for_states = min(budget, after_forward) // (STATES_DIVISOR if bytes_per_block else 1)
        num_slots = min(max_requests, for_states // bytes_per_sequence)
        # The whole share, not the slots that it was rounded down to: a plan with more memory would
        # else have a slot more, and blocks fewer.
        states = min(for_states, max_requests * bytes_per_sequence)
    derived = min(
        (budget - states) // max(1, bytes_per_block),
        (after_forward - states) // max(1, bytes_per_block + workspace_bytes_per_block),
    )
    return MemoryPlan(
        # What is held may lie where the device does not count it: weights mapped from a file.
        total_bytes=max(total_bytes, free_bytes + training.held),
        free_bytes=free_bytes,
        training=training,
        max_memory_percent=max_memory_percent,
        workspace_bytes=workspace_bytes,
        workspace_bytes_per_block=workspace_bytes_per_block,
        graph_bytes=graph_bytes,
        bytes_per_block=bytes_per_block,
        bytes_per_sequence=bytes_per_sequence,
        num_slots=num_slots,
        num_blocks=max(0, derived) if num_blocks is None else num_blocks,
        is_fixed=num_blocks is not None,
    )


def _budget(rest_bytes: int, max_memory_percent: float) -> int:
    return int(max_memory_percent * max(0, rest_bytes))


def _come(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} of it to come" if num_bytes else ""
