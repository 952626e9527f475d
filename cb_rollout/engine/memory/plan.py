"""Plan the memory of the KV cache. Arithmetic only: callers pass in what a device reports."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

GIB = 1024**3

# Where a model stores both recurrent states and keys, states take at most half the budget, so that
# neither starves the other.
STATES_DIVISOR = 2


class Part(NamedTuple):
    """A row of the plan's table."""

    name: str
    num_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """Bytes of a device's memory that training holds, and those that it will still allocate."""

    weights: int = 0
    """Of the trained model, and of the copy that generates where there is one."""
    gradients: int = 0
    """Those that exist now."""
    optimizer_states: int = 0
    """Those that exist now, where the optimizer is known."""
    gradients_to_come: int = 0
    """Estimated, before the first optimizer step."""
    optimizer_states_to_come: int = 0
    """Estimated, before the first optimizer step."""
    activations: int = 0
    """Measured: the peak of training beyond what it holds, while the cache was allocated too.
    Includes temporary gradients."""
    is_measured: bool = False
    """True after a full optimizer step was measured."""
    set_reserve: int | None = None
    """`training_reserve_gib`, which replaces all estimates and measurements; None: "auto"."""

    @property
    def reserve(self) -> int:
        """Return the bytes that training will still allocate."""
        if self.set_reserve is not None:
            return self.set_reserve
        return self.gradients_to_come + self.optimizer_states_to_come + self.activations

    @property
    def held(self) -> int:
        """Return the bytes that training holds now."""
        return self.weights + self.gradients + self.optimizer_states

    @property
    def parts(self) -> list[Part]:
        """Return the rows of what training holds and will allocate."""
        if self.set_reserve is not None:
            return [
                Part("weights", self.weights),
                Part("gradients", self.gradients, "now"),
                Part("optimizer states", self.optimizer_states, "now"),
                Part("training reserve", self.set_reserve, "training_reserve_gib"),
            ]
        grads, states = self.gradients_to_come, self.optimizer_states_to_come
        is_measured = "measured beside the cache" if self.is_measured else "not measured yet"
        return [
            Part("weights", self.weights),
            Part("gradients", self.gradients + grads, _to_come(grads)),
            Part("optimizer states", self.optimizer_states + states, _to_come(states)),
            Part("activations peak", self.activations, is_measured),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of the KV cache, and how it follows from the rest. Prints as a table."""

    total_bytes: int
    """Memory of the device, or the part of it that this process may use."""
    free_bytes: int
    """Free memory when the plan was made, less what dropped CUDA graphs will hold again; this
    process's share, where several share a device."""
    training: TrainingBytes
    """Memory that training holds and will still allocate."""
    max_memory_percent: float
    """Share of what training leaves that the cache may use."""
    workspace_bytes: int
    """Memory of a forward of the largest batch, apart from what it gathers."""
    workspace_bytes_per_block: int
    """Memory of a forward for each block that it gathers."""
    max_prefill_blocks: int
    """Blocks that a prefill of several rows gathers at most; a shared one counts for each row."""
    max_sequence_blocks: int | None
    """Blocks of one sequence at most; None: a forward may gather all blocks."""
    max_requests: int
    """Rows of a forward at most."""
    graph_bytes: int
    """Memory of CUDA graphs, captured before the plan was made; 0: there are none."""
    encoder_cache_bytes: int
    """Memory for the features of images; 0 for a model that reads none."""
    bytes_per_block: int
    """Keys and values of one block, over all layers."""
    bytes_per_sequence: int
    """Recurrent states of one sequence, over all layers; 0 where the model has none."""
    num_slots: int
    """Most sequences decoded together; not slots of the pages. Their states come first."""
    num_blocks: int
    """Maximum of blocks that the cache may grow to."""
    is_fixed: bool = False
    """True where `num_blocks` was set, rather than derived from the budget."""

    @property
    def training_reserve_bytes(self) -> int:
        """Return the bytes that training will still allocate."""
        return self.training.reserve

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that `max_memory_percent` allows."""
        claimed = self.training.reserve + self.encoder_cache_bytes
        return _budget(self.free_bytes - claimed, self.max_memory_percent)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all recurrent states."""
        return self.num_slots * self.bytes_per_sequence

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of `num_blocks` blocks."""
        return self.num_blocks * self.bytes_per_block

    @property
    def forward_bytes(self) -> int:
        """Return the bytes of a forward that gathers as many blocks as any may."""
        return self.workspace_bytes + self.gathered_bytes

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of keys and values that a forward gathers, of one layer at a time."""
        return self.workspace_bytes_per_block * _num_gathered_blocks(
            self.num_blocks, self.max_prefill_blocks, self.max_sequence_blocks, self.max_requests
        )

    @property
    def left_bytes(self) -> int:
        """Return the unclaimed bytes; negative where more is claimed than there is."""
        claimed = self.training.reserve + self.forward_bytes + self.encoder_cache_bytes
        return self.free_bytes - claimed - self.state_bytes - self.kv_bytes

    @property
    def parts(self) -> list[Part]:
        """Return the rows of the table, which add up to the total."""
        budget = f"{self.max_memory_percent:.0%} of what training leaves"
        how = "num_blocks" if self.is_fixed else budget
        left = self.left_bytes
        held, features = self.training.held + self.graph_bytes, self.encoder_cache_bytes
        return [
            Part("used otherwise", self.total_bytes - self.free_bytes - held),
            *self.training.parts,
            Part("forward workspace", self.forward_bytes),
            Part("CUDA graphs", self.graph_bytes, "" if self.graph_bytes else "none"),
            Part("image features", features, "encoder_cache_gib" if features else "none"),
            Part("recurrent states", self.state_bytes, f"{self.num_slots} sequences"),
            Part("KV cache", self.kv_bytes, f"{self.num_blocks} blocks at most, {how}"),
            Part("free", left, "more is claimed than there is" if left < 0 else ""),
        ]

    def __str__(self) -> str:
        """Return the plan as a table."""
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
    max_prefill_blocks: int = 0,
    max_sequence_blocks: int | None = None,
    graph_bytes: int = 0,
    encoder_cache_bytes: int = 0,
    bytes_per_block: int,
    bytes_per_sequence: int,
    max_requests: int,
    num_blocks: int | None,
) -> MemoryPlan:
    """Divide the free memory: budget = share x (free - reserve - features), rounded to blocks.

    States and blocks stay within the budget, and leave a forward its workspace.

    Args:
        total_bytes: memory of the device.
        free_bytes: the part of it that this process may still allocate.
        training: memory of training, kept out of the budget.
        max_memory_percent: the share, in (0, 1].
        workspace_bytes: memory of a forward of the largest batch, apart from what it gathers.
        workspace_bytes_per_block: memory of a forward for each block that it gathers.
        max_prefill_blocks: blocks that a prefill of several rows gathers at most.
        max_sequence_blocks: blocks of one sequence at most; None: a forward may gather all.
        graph_bytes: memory of CUDA graphs; not free.
        encoder_cache_bytes: memory for the features of images, kept out of the budget.
        bytes_per_block: 0 for a model that stores no keys.
        bytes_per_sequence: fixed-size states of one sequence.
        max_requests: maximum of sequences; fewer where their states exceed their share.
        num_blocks: fixed by the user; None: derived.
    """
    rest = max(0, free_bytes - training.reserve - encoder_cache_bytes)
    budget = _budget(rest, max_memory_percent)
    after_forward = max(0, rest - workspace_bytes)
    num_slots, states = max_requests, 0
    if bytes_per_sequence:
        for_states = min(budget, after_forward) // (STATES_DIVISOR if bytes_per_block else 1)
        num_slots = min(max_requests, for_states // bytes_per_sequence)
        # Not rounded down to sequences: a plan with more memory would otherwise have one sequence
        # more and fewer blocks.
        states = min(for_states, max_requests * bytes_per_sequence)

    def bytes_beside_forward(num_blocks: int) -> int:
        gathered = _num_gathered_blocks(
            num_blocks, max_prefill_blocks, max_sequence_blocks, max_requests
        )
        return num_blocks * max(1, bytes_per_block) + gathered * workspace_bytes_per_block

    most = max(0, (budget - states) // max(1, bytes_per_block))
    derived = bisect_right(range(most + 1), after_forward - states, key=bytes_beside_forward) - 1
    return MemoryPlan(
        # The device may not count all that training holds, such as weights mapped from a file.
        total_bytes=max(total_bytes, free_bytes + training.held + graph_bytes),
        free_bytes=free_bytes,
        training=training,
        max_memory_percent=max_memory_percent,
        workspace_bytes=workspace_bytes,
        workspace_bytes_per_block=workspace_bytes_per_block,
        max_prefill_blocks=max_prefill_blocks,
        max_sequence_blocks=max_sequence_blocks,
        max_requests=max_requests,
        graph_bytes=graph_bytes,
        encoder_cache_bytes=encoder_cache_bytes,
        bytes_per_block=bytes_per_block,
        bytes_per_sequence=bytes_per_sequence,
        num_slots=num_slots,
        num_blocks=max(0, derived) if num_blocks is None else num_blocks,
        is_fixed=num_blocks is not None,
    )


def _num_gathered_blocks(
    num_blocks: int, max_prefill_blocks: int, max_sequence_blocks: int | None, max_requests: int
) -> int:
    """Return the most blocks that a forward gathers from a cache of `num_blocks`."""
    of_one_row = num_blocks
    if max_sequence_blocks is not None:
        of_one_row = min(num_blocks, max_sequence_blocks)
    return max(of_one_row, min(max_prefill_blocks, max_requests * of_one_row))


def _budget(rest_bytes: int, max_memory_percent: float) -> int:
    return int(max_memory_percent * max(0, rest_bytes))


def _to_come(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} of it to come" if num_bytes else ""
