"""One line of a check-up."""

from dataclasses import dataclass
from enum import IntEnum

NAME_WIDTH = 26
# Wide enough for the longest module that is looked for.


class Level(IntEnum):
    """How a finding bears on use; the worst one decides."""

    OK = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and what was found."""

    level: Level
    name: str
    text: str

    def __str__(self) -> str:
        """One line."""
        mark = {Level.OK: "  ", Level.WARNING: "! ", Level.BAD: "X "}[self.level]
        return f"{mark}{self.name:<{NAME_WIDTH}} {' '.join(self.text.split())}"
