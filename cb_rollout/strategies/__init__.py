"""Decide which groups a training step gets: what is submitted, cancelled and kept.

A strategy holds settings; `GroupCollector` acts on them over the engine.
"""

from cb_rollout.strategies.base import (
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
]
