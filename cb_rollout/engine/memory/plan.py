"""Plan the memory of the KV cache. Arithmetic only: callers pass in what a device reports."""

from bisect import bisect_right
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

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
    """Weights of the trained model, and of the generating copy if there is one."""
    gradients: int = 0
    """Gradients that exist now."""
    optimizer_states: int = 0
    """Optimizer states that exist now, if the optimizer is known."""
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
        """Return the rows of the plan's table about training."""
        if self.set_reserve is not None:
            return [
                Part("weights", self.weights),
                Part("gradients", self.gradients, "now"),
                Part("optimizer states", self.optimizer_states, "now"),
                Part("training reserve", self.set_reserve, "training_reserve_gib"),
            ]
        activations_note = "not measured yet"
        if self.is_measured:
            activations_note = "measured beside the cache"
        gradients = self.gradients + self.gradients_to_come
        states = self.optimizer_states + self.optimizer_states_to_come
        return [
            Part("weights", self.weights),
            Part("gradients", gradients, _to_come(self.gradients_to_come)),
            Part("optimizer states", states, _to_come(self.optimizer_states_to_come)),
            Part("activations peak", self.activations, activations_note),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """The plan's inputs from the device, the model and the settings."""

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
    """Maximum rows of a forward; also of sequences decoded together, if their states fit."""
    max_batch_tokens: int
    bytes_per_token: int
    """Keys and values of a token, over all layers; 0 for a model that stores none."""
    bytes_per_sequence: int
    """Recurrent states of a sequence, over all layers; 0 if the model has none."""
    workspace_bytes_per_request: int
    """Memory of a forward per row, without gathered keys."""
    gathered_bytes_per_token: int
    """Memory of a forward per gathered token of history, for one layer at a time."""
    history_factor: int = 1
    """Maximum gathered tokens of a prefill per token that it may compute, unless it has a single
    row."""
    max_sequence_tokens: int | None = None
    """Maximum tokens of a sequence if only prefills gather; None: no limit, or decode steps gather
    too."""
    graph_bytes: int = 0
    """Memory of CUDA graphs, captured before the plan was made; 0: there are none."""
    set_blocks: int | None = None
    """`num_blocks` of the settings; None: derived from the budget."""

    @property
    def budget_bytes(self) -> int:
        return int(self.max_memory_percent * self.rest_bytes)

    @property
    def rest_bytes(self) -> int:
        """Return the free bytes that training leaves."""
        return max(0, self.free_bytes - self.training.reserve)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    @property
    def workspace_bytes(self) -> int:
        return self.workspace_bytes_per_request * self.max_requests

    def gathered_bytes_of(self, num_blocks: int) -> int:
        """Return the maximum bytes that a forward gathers; a shared block counts for each row."""
        of_one_row = num_blocks
        if self.max_sequence_tokens is not None:
            of_one_row = min(num_blocks, self._blocks_for(self.max_sequence_tokens))
        of_all_rows = self.max_requests * of_one_row
        # The batch's tokens limit a prefill of several rows, but not of a single row.
        of_prefill = self._blocks_for(self.history_factor * self.max_batch_tokens)
        num_gathered = max(of_one_row, min(of_prefill, of_all_rows))
        return num_gathered * self.gathered_bytes_per_token * self.block_size

    def _blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for so many tokens; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(MemoryModel):
    """The size of the KV cache and the numbers behind it, in bytes. Prints as a table."""

    num_slots: int
    """Maximum sequences decoded together. Memory for their recurrent states comes first."""
    num_blocks: int
    """Maximum number of blocks to which the cache may grow."""
    offload_bytes: int = 0
    """Maximum host memory for the keys of preempted sequences; 0 on a CPU."""
    offload_obstacle: str = ""
    """Reason why `cpu_offload_space` has no effect; "": it has an effect, or is 0."""

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
    def num_tokens(self) -> int:
        """Return the maximum number of tokens in the cache."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def forward_bytes(self) -> int:
        """Return the bytes of the largest forward: one that gathers every block of the cache."""
        return self.workspace_bytes + self.gathered_bytes_of(self.num_blocks)

    @property
    def left_bytes(self) -> int:
        """Return the unclaimed bytes; negative if more is claimed than the device has."""
        claimed = self.training.reserve + self.forward_bytes
        return self.free_bytes - claimed - self.state_bytes - self.kv_bytes

    @property
    def parts(self) -> list[Part]:
        """Return the rows of the table, which add up to the total."""
        held = self.training.held + self.graph_bytes
        limit = f"{self.max_memory_percent:.0%} of what training leaves"
        if self.is_fixed:
            limit = "num_blocks"
        free_note = ""
        if self.left_bytes < 0:
            free_note = "more is claimed than there is"
        return [
            Part("used otherwise", self.total_bytes - self.free_bytes - held),
            *self.training.parts,
            Part("forward workspace", self.forward_bytes),
            Part("CUDA graphs", self.graph_bytes, _none_of(self.graph_bytes)),
            Part("recurrent states", self.state_bytes, f"{self.num_slots} sequences"),
            Part("KV cache", self.kv_bytes, f"{self.num_blocks} blocks at most, {limit}"),
            Part("free", self.left_bytes, free_note),
        ]

    def __str__(self) -> str:
        rows = [Part("total", self.total_bytes), *self.parts]
        if self.offload_bytes or self.offload_obstacle:
            note = self.offload_obstacle or "of host memory at most, for preempted sequences"
            rows.append(Part("offloaded keys", self.offload_bytes, note))
        lines: list[str] = []
        for name, num_bytes, note in rows:
            line = f"{name:<18}{num_bytes / GIB:>11.3f} GiB  {note}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def create_memory_plan(model: MemoryModel) -> MemoryPlan:
    """Divide the free memory: budget = share x (free - reserve), in blocks.

    States and blocks stay within the budget, and leave a forward its workspace.
    """
    budget = model.budget_bytes
    after_forward = max(0, model.rest_bytes - model.workspace_bytes)
    num_slots = model.max_requests
    states = 0
    if model.bytes_per_sequence:
        for_states = min(budget, after_forward)
        if model.bytes_per_token:
            for_states //= STATES_DIVISOR
        num_slots = min(model.max_requests, for_states // model.bytes_per_sequence)
        # Not rounded down to sequences: a plan with more memory would otherwise have one sequence
        # more and fewer blocks.
        states = min(for_states, model.max_requests * model.bytes_per_sequence)
    block_bytes = max(1, model.bytes_per_block)

    def bytes_beside_forward(num_blocks: int) -> int:
        return num_blocks * model.bytes_per_block + model.gathered_bytes_of(num_blocks)

    most = budget
    # Blocks without keys take no memory, even if states fill the budget.
    if model.bytes_per_token:
        most = max(0, (budget - states) // block_bytes)
    if model.set_blocks is None:
        available = after_forward - states
        # The most blocks that fit together with what a forward gathers from them.
        fitting = bisect_right(range(most + 1), available, key=bytes_beside_forward) - 1
        num_blocks = max(0, fitting)
    else:
        num_blocks = model.set_blocks
    numbers: dict[str, Any] = {}
    for field in fields(MemoryModel):
        numbers[field.name] = getattr(model, field.name)
    # The device may not count all that training holds, such as weights mapped from a file.
    counted = model.free_bytes + model.training.held + model.graph_bytes
    numbers["total_bytes"] = max(model.total_bytes, counted)
    return MemoryPlan(**numbers, num_slots=num_slots, num_blocks=num_blocks)


def _to_come(num_bytes: int) -> str:
    if num_bytes == 0:
        return ""
    return f"{num_bytes / GIB:.3f} of it to come"


def _none_of(num_bytes: int) -> str:
    if num_bytes == 0:
        return "none"
    return ""
