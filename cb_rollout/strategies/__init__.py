"""Which groups a training step gets: what is submitted, cancelled and kept.

`create_strategy` is the switch; `GroupCollector` does what a strategy decides.
"""

from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies.base import Strategy
from cb_rollout.strategies.collector import GroupCollector
from cb_rollout.strategies.dynamic_sampling import DynamicSampling
from cb_rollout.strategies.group import Group
from cb_rollout.strategies.over_sampling import OverSampling
from cb_rollout.strategies.partial_rollouts import PartialRollouts
from cb_rollout.strategies.plain import Plain
from cb_rollout.strategies.request_stream import Flight
from cb_rollout.strategies.retrying import Retrying

__all__ = [
    "DynamicSampling",
    "Flight",
    "Group",
    "GroupCollector",
    "OverSampling",
    "PartialRollouts",
    "Plain",
    "Retrying",
    "Strategy",
    "create_strategy",
]

_STRATEGIES = {s.name: s for s in (Plain, OverSampling, DynamicSampling, PartialRollouts, Retrying)}


def create_strategy(name: str, **settings: Any) -> Strategy:
    """A strategy by the name of its file, for settings that come from a command line or yaml.

    Raises:
        ConfigurationError: there is none of this name, or it has no such setting.
    """
    if name not in _STRATEGIES:
        raise ConfigurationError(f"strategy {name!r} is not one of {', '.join(_STRATEGIES)}.")
    try:
        return _STRATEGIES[name](**settings)
    except TypeError as error:
        raise ConfigurationError(f"{error}; see the class's fields.") from error
