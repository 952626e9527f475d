"""Sample a trainer's completions on a pool, with what a trainer uses of `RolloutGenerator`.

Owns the metrics of the last rollout. The pool is the caller's, and stays open. Called from the
training thread.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, Self

import torch

from cb_rollout.config.combinations import refused
from cb_rollout.config.hf import from_generation_config
from cb_rollout.integrations.ray.pool import RolloutPool
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.generator import measured
from cb_rollout.rollout.prompts import Prompt
from cb_rollout.types import GenerationOutput, SyncReport


class PooledGenerator:
    """A pool as the generator of one model in training."""

    def __init__(
        self,
        pool: RolloutPool,
        model: torch.nn.Module | None = None,
        generation_config: Any = None,
    ) -> None:
        """Check that the pool can serve a trainer.

        Args:
            pool: samples; it is not closed here.
            model: the training module, wrapped or not, whose weights `sync_weights` sends; None:
                another way sends them.
            generation_config: defaults of every request; None: the checkpoint's.

        Raises:
            ConfigurationError: a setting of the pool cannot be honoured.
        """
        self.config, self.tokenizer = pool.config, pool.tokenizer
        for fault, advice, is_so in (
            ("return_logprobs=False", "leave it True", not self.config.return_logprobs),
            ("router_replay=True", "attach a RolloutConfig instead", self.config.router_replay),
        ):
            if is_so:
                raise refused("pool, trainer's needs", fault=fault, advice=advice)
        self.pool, self._model = pool, model
        defaults = pool.manager.defaults
        if generation_config is not None:
            defaults = from_generation_config(generation_config)
        self.manager = replace(pool.manager, defaults=defaults)
        self._generation_config = generation_config
        self._last_metrics: dict[str, float] = {}

    @property
    def policy_version(self) -> int:
        """Return the version recorded with every new token."""
        return self.pool.policy_version

    def generate_batch(
        self, inputs: Iterable[Prompt], generation_config: Any = None, **more: Any
    ) -> dict[str, GenerationOutput]:
        """Sample completions with the trainer's settings; see `RolloutPool.generate_batch`."""
        chosen = generation_config or self._generation_config
        with measured(self.manager) as metrics:
            outputs = self.pool.generate_batch(inputs, chosen, **more)
        self._last_metrics = metrics
        return outputs

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout and of the pool now, by name."""
        return self._last_metrics | status_metrics(self.manager.status())

    def follow(self, model: torch.nn.Module) -> None:
        """Use this re-wrapped model as the weight source."""
        self._model = model

    def sync_weights(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> SyncReport:
        """Send the model's weights to the workers; see `RolloutPool.sync_weights`."""
        assert self._model is not None, "no module to send"
        return self.pool.sync_weights(self._model, in_flight=in_flight)

    def sleep(self) -> None:
        """Do nothing: the workers' memory is not the trainer's."""

    def wake(self) -> None:
        """Do nothing: the workers run until the pool is closed."""

    def lend_to_trainer(self) -> None:
        """Do nothing: the workers run models of their own."""

    def close(self) -> None:
        """Let another trainer update the pool, which stays open."""
        self.pool.follow(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
