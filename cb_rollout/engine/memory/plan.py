"""Plan the memory of the KV cache. Arithmetic only: callers pass in what a device reports."""

from bisect import bisect_right
from dataclasses import dataclass, fields
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
        if self.set_reserve is not None:
            return self.set_reserve
        return self.gradients_to_come + self.optimizer_states_to_come + self.activations

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer_states

    @property
    def parts(self) -> list[Part]:
        is_measured = "measured beside the cache" if self.is_measured else "not measured yet"
        last = Part("activations peak", self.activations, is_measured)
        grads, states = self.gradients_to_come, self.optimizer_states_to_come
        if self.set_reserve is not None:
            last = Part("training reserve", self.set_reserve, "training_reserve_gib")
            grads = states = 0
        now = "" if self.set_reserve is None else "now"
        return [
            Part("weights", self.weights),
            Part("gradients", self.gradients + grads, _to_come(grads) or now),
            Part("optimizer states", self.optimizer_states + states, _to_come(states) or now),
            last,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """The numbers that a device, a model and the settings give to the plan."""

    total_bytes: int
    """Memory of the device, or the part of it that this process may use."""
    free_bytes: int
    """Memory that this process may still allocate, less what dropped CUDA graphs will hold again;
    this process's share, where several share a device."""
    training: TrainingBytes
    max_memory_percent: float
    """Share, in (0, 1], of what training leaves that the cache may use."""
    block_size: int
    max_requests: int
    """Rows of a forward at most; sequences decoded together, unless their states need too much."""
    max_batch_tokens: int
    max_blocks_per_request: int | None = None
    bytes_per_token: int
    """Keys and values of a token, over all layers; 0 for a model that stores none."""
    bytes_per_sequence: int
    """Recurrent states of a sequence, over all layers; 0 where the model has none."""
    workspace_bytes_per_request: int
    """Memory of a forward for each row, apart from what it gathers."""
    gathered_bytes_per_token: int
    """Memory of a forward for each token of history that it gathers, of one layer at a time."""
    history_factor: int = 1
    """Tokens that the rows of a prefill gather together, for each token that it may compute, unless
    it has one row only."""
    max_sequence_tokens: int | None = None
    """Most tokens of a sequence, where only prefills gather; None: no limit, or decode steps
    gather too."""
    graph_bytes: int = 0
    """Memory of CUDA graphs, captured before the plan was made; 0: there are none."""
    packed_weight_bytes: int = 0
    """Memory for packed weights of linear layers, kept out of the budget; 0 on a GPU."""
    set_blocks: int | None = None
    """`num_blocks` of the settings; None: derived from the budget."""

    @property
    def budget_bytes(self) -> int:
        return int(self.max_memory_percent * self.rest_bytes)

    @property
    def rest_bytes(self) -> int:
        """Return the free bytes that training and packed weights leave."""
        return max(0, self.free_bytes - self.training.reserve - self.packed_weight_bytes)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def workspace_bytes(self) -> int:
        return self.workspace_bytes_per_request * self.max_requests

    def gathered_bytes_of(self, num_blocks: int) -> int:
        """Return the most bytes that a forward gathers; a shared block counts for each row."""
        of_one_row = num_blocks
        if self.max_sequence_tokens is not None:
            of_one_row = min(num_blocks, -(-self.max_sequence_tokens // self.block_size))
            of_one_row = min(of_one_row, self.max_blocks_per_request or of_one_row)
        of_prefill = -(-self.history_factor * self.max_batch_tokens // self.block_size)
        num_gathered = max(of_one_row, min(of_prefill, self.max_requests * of_one_row))
        return num_gathered * self.gathered_bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(MemoryModel):
    """The memory of the KV cache, and how it follows from the rest. Prints as a table."""

    num_slots: int
    """Most sequences decoded together; not slots of the pages. Their states come first."""
    num_blocks: int
    """Maximum of blocks that the cache may grow to."""

    @property
    def is_fixed(self) -> bool:
        """Return whether `num_blocks` was set, rather than derived from the budget."""
        return self.set_blocks is not None

    @property
    def has_room(self) -> bool:
        return bool(self.num_blocks and self.num_slots)

    @property
    def state_bytes(self) -> int:
        return self.num_slots * self.bytes_per_sequence

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def forward_bytes(self) -> int:
        """Return the bytes of a forward that gathers as many blocks as any may."""
        return self.workspace_bytes + self.gathered_bytes_of(self.num_blocks)

    @property
    def left_bytes(self) -> int:
        """Return the unclaimed bytes; negative where more is claimed than there is."""
        claimed = self.training.reserve + self.forward_bytes + self.packed_weight_bytes
        return self.free_bytes - claimed - self.state_bytes - self.kv_bytes

    @property
    def parts(self) -> list[Part]:
        """Return the rows of the table, which add up to the total."""
        budget = f"{self.max_memory_percent:.0%} of what training leaves"
        how = "num_blocks" if self.is_fixed else budget
        left = self.left_bytes
        held, packed = self.training.held + self.graph_bytes, self.packed_weight_bytes
        return [
            Part("used otherwise", self.total_bytes - self.free_bytes - held),
            *self.training.parts,
            Part("forward workspace", self.forward_bytes),
            Part("CUDA graphs", self.graph_bytes, "" if self.graph_bytes else "none"),
            Part("packed weights", packed, "" if packed else "none"),
            Part("recurrent states", self.state_bytes, f"{self.num_slots} sequences"),
            Part("KV cache", self.kv_bytes, f"{self.num_blocks} blocks at most, {how}"),
            Part("free", left, "more is claimed than there is" if left < 0 else ""),
        ]

    def __str__(self) -> str:
        rows = [Part("total", self.total_bytes), *self.parts]
        return "\n".join(
            f"{name:<18}{size / GIB:>11.3f} GiB  {note}".rstrip() for name, size, note in rows
        )


def create_memory_plan(model: MemoryModel) -> MemoryPlan:
    """Divide the free memory: budget = share x (free - reserve - packed weights), in blocks.

    States and blocks stay within the budget, and leave a forward its workspace.
    """
    budget, num_slots, states = model.budget_bytes, model.max_requests, 0
    after_forward = max(0, model.rest_bytes - model.workspace_bytes)
    if model.bytes_per_sequence:
        for_states = min(budget, after_forward) // (STATES_DIVISOR if model.bytes_per_token else 1)
        num_slots = min(model.max_requests, for_states // model.bytes_per_sequence)
        # Not rounded down to sequences: a plan with more memory would otherwise have one sequence
        # more and fewer blocks.
        states = min(for_states, model.max_requests * model.bytes_per_sequence)
    block_bytes = max(1, model.bytes_per_block)

    def bytes_beside_forward(num_blocks: int) -> int:
        return num_blocks * model.bytes_per_block + model.gathered_bytes_of(num_blocks)

    # Blocks without keys take no memory, also where states fill the budget.
    most = max(0, (budget - states) // block_bytes) if model.bytes_per_token else budget
    derived = bisect_right(range(most + 1), after_forward - states, key=bytes_beside_forward) - 1
    numbers = {field.name: getattr(model, field.name) for field in fields(MemoryModel)}
    # The device may not count all that training holds, such as weights mapped from a file.
    counted = model.free_bytes + model.training.held + model.graph_bytes
    numbers["total_bytes"] = max(model.total_bytes, counted)
    num_blocks = max(0, derived) if model.set_blocks is None else model.set_blocks
    return MemoryPlan(**numbers, num_slots=num_slots, num_blocks=num_blocks)


def _to_come(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} of it to come" if num_bytes else ""
