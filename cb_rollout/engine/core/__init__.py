"""Hold the engine, the model that it has accepted, and the plan of its memory."""

from cb_rollout.engine.core.engine import Engine

__all__ = ["Engine"]
