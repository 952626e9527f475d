"""How much memory the KV cache may take. Arithmetic only; what a device reports is passed in."""

from dataclasses import dataclass

GIB = 1024**3

OPTIMIZER_STATES_PER_PARAMETER = 2
# Adam and its kin keep a first and a second moment.

STATES_SHARE = 0.5
# Of the budget, where a model keeps recurrent states and keys: neither starves the other.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the KV cache may take, and how that follows. Prints as a table. All in bytes."""

    free_bytes: int
    """Free on the device when the plan was made."""
    training_reserve_bytes: int
    """What training will still allocate."""
    max_memory_percent: float
    """Share of the rest that the cache may take."""
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
    def budget_bytes(self) -> int:
        """What `max_memory_percent` allows."""
        return int(self.max_memory_percent * max(0, self.free_bytes - self.training_reserve_bytes))

    @property
    def state_bytes(self) -> int:
        """What the recurrent states of all slots take."""
        return self.num_slots * self.bytes_per_sequence

    @property
    def kv_bytes(self) -> int:
        """What `num_blocks` blocks take."""
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        """The plan as a table."""
        rows = [
            ("free", self.free_bytes),
            ("training reserve", self.training_reserve_bytes),
            (f"budget ({self.max_memory_percent:.0%} of the rest)", self.budget_bytes),
            (f"recurrent states ({self.num_slots} sequences)", self.state_bytes),
            (f"KV cache ({self.num_blocks} blocks at most)", self.kv_bytes),
        ]
        return "\n".join(f"{name:<40}{size / GIB:>10.3f} GiB" for name, size in rows)


def create_memory_plan(
    *,
    free_bytes: int,
    training_reserve_bytes: int,
    max_memory_percent: float,
    bytes_per_block: int,
    bytes_per_sequence: int,
    max_requests: int,
    num_blocks: int | None,
) -> MemoryPlan:
    """Divide the free memory: budget = share x (free - reserve), rounded down to blocks.

    Args:
        free_bytes: what the device reports.
        training_reserve_bytes: kept out of the budget.
        max_memory_percent: the share, in (0, 1].
        bytes_per_block: 0 for a model that keeps no keys.
        bytes_per_sequence: fixed-size states of one sequence.
        max_requests: most slots; fewer where their states would not fit their share of the budget.
        num_blocks: fixed by the user; None: derived.
    """
    budget = int(max_memory_percent * max(0, free_bytes - training_reserve_bytes))
    num_slots = max_requests
    if bytes_per_sequence:
        states_budget = int(budget * STATES_SHARE) if bytes_per_block else budget
        num_slots = min(max_requests, states_budget // bytes_per_sequence)
    left = budget - num_slots * bytes_per_sequence
    return MemoryPlan(
        free_bytes=free_bytes,
        training_reserve_bytes=training_reserve_bytes,
        max_memory_percent=max_memory_percent,
        bytes_per_block=bytes_per_block,
        bytes_per_sequence=bytes_per_sequence,
        num_slots=num_slots,
        num_blocks=left // max(1, bytes_per_block) if num_blocks is None else num_blocks,
        is_fixed=num_blocks is not None,
    )


def training_reserve(trainable_bytes: int, gradient_bytes: int) -> int:
    """What the first optimizer step will still allocate: gradients and two moments.

    Args:
        trainable_bytes: size of the parameters that require gradients.
        gradient_bytes: size of the gradients that exist already.
    """
    gradients_to_come = max(0, trainable_bytes - gradient_bytes)
    return gradients_to_come + OPTIMIZER_STATES_PER_PARAMETER * trainable_bytes
