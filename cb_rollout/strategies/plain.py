"""Everything asked for, nothing dropped."""

from dataclasses import dataclass

from cb_rollout.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class Plain(Strategy):
    """The default: each prompt's whole group, in order, whatever its rewards."""

    name = "plain"
