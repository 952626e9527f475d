"""Define a strategy's settings: groups to submit, to keep and to carry over.

A strategy holds settings and no state; `GroupCollector` acts on them.
"""

from dataclasses import dataclass
from typing import ClassVar

from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies.group import Group

# Every strategy class with a name, for `create_strategy`.
STRATEGIES: dict[str, type["Strategy"]] = {}


class Strategy:
    """Base of all strategies: submits what is wanted and drops nothing.

    A subclass turns the attributes that it decides into dataclass fields.
    """

    name: ClassVar[str]

    num_extra_groups: int = 0
    """Groups in flight beyond those still wanted."""
    num_extra_members: int = 0
    """Completions of each prompt beyond a group's size; the first to finish make the group."""
    carries: bool = False
    """True: unfinished groups go on in the next step. False: they are cancelled."""
    max_staleness: int | None = None
    """Most policy versions that a carried group may last; an older one starts anew."""
    max_dropped_groups: int = 0
    """Most groups replaced by others in one step."""
    max_retries: int = 0
    """Further tries of a completion that failed or could not be scored."""
    min_group_size: int | None = None
    """Fewest scored completions that still make a group; None: all of them."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            STRATEGIES[cls.name] = cls

    def keeps(self, group: Group) -> bool:
        """Decide whether a complete, scored group is worth training on."""
        del group
        return True


@dataclass(frozen=True, kw_only=True)
class Plain(Strategy):
    """The default: each prompt's whole group, in order, whatever its rewards."""

    name = "plain"


def require_whole_numbers(strategy: Strategy, **least: int) -> None:
    """Raise `ConfigurationError` for a setting that is not a whole number, or below its least."""
    for name, low in least.items():
        value = getattr(strategy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ConfigurationError(
                f"{type(strategy).__name__}({name}={value!r}) is not a whole number >= {low}."
            )
