"""Define the findings of a proof of decode steps. Records only."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum


class StepPart(StrEnum):
    """The part of a decode step that a finding concerns."""

    FORWARD = "forward"
    SAMPLING = "sampling"


@dataclass(frozen=True, slots=True)
class ProofFinding:
    """A difference between a captured step and the plain computation."""

    part: StepPart
    form: str
    """The step that ran, such as "a graph of 4 rows, cut, with a shared prompt"."""
    difference: str
    """By how much it is off, or the error that it raised."""
    graph: Hashable = None
    """The key of the graph that ran; None: no graph ran."""

    def __str__(self) -> str:
        return f"{self.form}: {self.difference}"
