"""Decide which groups a training step gets: what is submitted, cancelled and kept.

A strategy holds settings; `GroupCollector` acts on them over the engine.
"""

import inspect
from typing import Any

from cb_rollout.config.checks import require_known
from cb_rollout.errors import ConfigurationError
from cb_rollout.strategies.base import (
    STRATEGIES,
    DynamicSampling,
    Group,
    OverSampling,
    PartialRollouts,
    Plain,
    Retrying,
    Strategy,
)
from cb_rollout.strategies.collector import GroupCollector
from cb_rollout.strategies.request_stream import RequestStream

__all__ = [
    "DynamicSampling",
    "Group",
    "GroupCollector",
    "OverSampling",
    "PartialRollouts",
    "Plain",
    "RequestStream",
    "Retrying",
    "Strategy",
    "create_strategy",
]


def create_strategy(name: str, **settings: Any) -> Strategy:
    """Return an imported strategy by its `name`, with settings of a command line or yaml.

    Raises:
        ConfigurationError: no strategy has this name, or it has no such setting.
    """
    if name not in STRATEGIES:
        raise ConfigurationError(f"strategy {name!r} is not one of {', '.join(STRATEGIES)}.")
    fields = list(inspect.signature(STRATEGIES[name]).parameters)
    require_known(settings, fields, f"strategy {name!r} has no setting", ConfigurationError)
    try:
        return STRATEGIES[name](**settings)
    except TypeError as error:
        raise ConfigurationError(f"{error}; see the class's fields.") from error
