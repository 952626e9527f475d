"""What a forward that raised means: too little memory, a broken model, or one bad row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cb_rollout.engine.memory.device import is_out_of_memory


@dataclass(slots=True)
class Outcome:
    """What became of the rows of a forward. V: vocabulary."""

    logits: list[torch.Tensor]
    """Float32 `[rows, V]` parts that together hold the rows that ran, in order."""
    rows: list[int]
    """Which rows ran."""
    failures: list[tuple[int, Exception]]
    """Which did not, and why."""

    @property
    def logits_BV(self) -> torch.Tensor:
        """Logits of the rows that ran, of which there is at least one."""
        return self.logits[0] if len(self.logits) == 1 else torch.cat(self.logits)


def run_isolated(forward: Callable[[Sequence[int]], torch.Tensor], num_rows: int) -> Outcome:
    """Run a forward over rows `0 .. num_rows - 1`; where it raises, find the rows that cannot run.

    Halves are tried until the bad rows are alone, so `k` of them cost about `2 k log2(num_rows)`
    forwards and all others run. `forward` must leave the cache of the rows it raised for as it was,
    or write it again when it is repeated.

    Raises:
        Exception: whatever says that memory ran out, for the caller to make room.
    """
    outcome = Outcome([], [], [])
    pending: list[Sequence[int]] = [range(num_rows)]
    while pending:
        rows = pending.pop()
        try:
            outcome.logits.append(forward(rows))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if len(rows) == 1:
                outcome.failures.append((rows[0], error))
            else:
                middle = len(rows) // 2
                pending += [rows[middle:], rows[:middle]]
        else:
            outcome.rows.extend(rows)
    return outcome
