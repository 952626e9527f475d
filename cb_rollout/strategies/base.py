"""What a strategy decides: how much to submit, what to keep, and what becomes of the rest.

A strategy holds settings and no state; `GroupCollector` asks it and acts.
"""

from typing import ClassVar

from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies.group import Group


class Strategy:
    """Everything asked for, nothing dropped; a subclass makes fields of what it decides."""

    name: ClassVar[str]

    num_extra_groups: int = 0
    """Groups in flight beyond those still wanted."""
    num_extra_members: int = 0
    """Completions of each prompt beyond a group's size; the first to finish make the group."""
    carries: bool = False
    """Whether unfinished groups go on in the next step; if not, they are cancelled."""
    max_staleness: int | None = None
    """Most policy versions that a carried group may last; an older one starts anew."""
    max_dropped_groups: int = 0
    """Most groups replaced by others in one step."""
    max_retries: int = 0
    """How often a completion that failed or could not be scored is tried again."""
    min_group_size: int | None = None
    """Fewest scored completions that still make a group; None: all of them."""

    def keeps(self, group: Group) -> bool:
        """Whether a complete, scored group is worth training on."""
        del group
        return True


def require_whole_numbers(strategy: Strategy, **least: int) -> None:
    """Raise `ConfigurationError` for a setting that is not a whole number, or below its least."""
    for name, low in least.items():
        value = getattr(strategy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigurationError(
                f"{type(strategy).__name__}({name}={value!r}) is not a whole number >= {low}."
            )
