"""Decide whether rows of several adapters run in one forward, and check that forward.

The base model's products are then computed once for all rows. The first step of each set of
adapters runs both ways, and only the separate forwards count. Called by the thread that steps the
engine. B: rows, V: vocabulary.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.memory.device import is_out_of_memory
from cb_rollout.engine.numerics.agreement import agrees, rounding_noise
from cb_rollout.errors import error_text

_LOGGER = logging.getLogger(__name__)

Forward = Callable[[ForwardBatch], torch.Tensor]
MixedForward = Callable[[ForwardBatch], torch.Tensor | None]


class Precise(Protocol):
    """Something that knows the dtype to which forwards round."""

    @property
    def rounding_dtype(self) -> torch.dtype: ...


class AdapterMixing:
    """Verdicts on the sets of adapters that one forward of an engine's model may mix."""

    def __init__(self, runner: Precise) -> None:
        """Prove nothing yet.

        Args:
            runner: runs the forwards.
        """
        self._runner = runner
        self._verdicts: dict[frozenset[str | None], bool] = {}
        self.obstacle = ""
        """Why mixing adapters was last refused; "": it never was."""

    @property
    def has_proved(self) -> bool:
        """Return whether a set of adapters is mixed."""
        return any(self._verdicts.values())

    def forget(self) -> None:
        """Prove every set again, because the model changed."""
        self._verdicts.clear()
        self.obstacle = ""

    def logits(
        self, batch: ForwardBatch, by_adapter: Forward, mixed: MixedForward
    ) -> torch.Tensor | None:
        """Return float32 logits, `[B, V]`, of a decode step; None: its adapters are not mixed.

        Args:
            batch: rows of several adapters, whose forward may be repeated.
            by_adapter: runs a forward for each adapter.
            mixed: runs one forward, or returns None where the adapters have none.
        """
        adapters = frozenset(batch.rows_of_adapters)
        verdict = self._verdict(adapters)
        if verdict is False:
            return None
        if verdict is None:
            logits_BV = self._attempt(batch, mixed)
            # Last, so that the cache keeps the keys of the separate forwards.
            expected_BV = by_adapter(batch)
            if logits_BV is not None:
                self._verdicts[adapters] = self._agrees(batch, logits_BV, expected_BV)
            return expected_BV
        return self._attempt(batch, mixed)

    def _verdict(self, adapters: frozenset[str | None]) -> bool | None:
        """Return whether adapters are mixed; None if neither they nor a larger set was tried."""
        verdict = self._verdicts.get(adapters)
        if verdict is None and any(self._verdicts[s] for s in self._verdicts if adapters < s):
            return True
        return verdict

    def _agrees(
        self, batch: ForwardBatch, logits_BV: torch.Tensor, expected_BV: torch.Tensor
    ) -> bool:
        """Return whether one forward gave the logits of the separate ones, up to rounding."""
        expected = [expected_BV.log_softmax(-1)]
        noise = rounding_noise(expected, None, self._runner.rounding_dtype)
        agreement = agrees([logits_BV.log_softmax(-1)], expected, noise)
        if not agreement:
            self._refuse(batch, f"one forward of them differs by {agreement}")
        return bool(agreement)

    def _attempt(self, batch: ForwardBatch, mixed: MixedForward) -> torch.Tensor | None:
        """Run one forward; None if it fails, and these adapters are no longer mixed."""
        try:
            logits_BV = mixed(batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._refuse(batch, f"one forward of them fails ({error_text(error)})")
            return None
        if logits_BV is None:
            self._refuse(batch, "PEFT mixes plain LoRA layers of the model itself only")
        return logits_BV

    def _refuse(self, batch: ForwardBatch, reason: str) -> None:
        self._verdicts[frozenset(batch.rows_of_adapters)] = False
        if reason != self.obstacle:
            _LOGGER.info("adapters run in a forward for each: %s", reason)
        self.obstacle = reason
