"""Hold a model for rollouts while there is work, and hand it back to training in between.

Called by the thread that steps the engine, or by a thread that paused it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode


class ModelLease:
    """One engine's use of a model that training uses too.

    Owns the model's evaluation mode and the operators of `numerics="bitwise"` while there is work,
    and the event that was recorded when the training thread gave the model back.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        numerics: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """Hold nothing yet; `begin` waits for the calling thread's work so far.

        Args:
            model: generates.
            device: the model's.
            numerics: returns the context of the model's forwards.
        """
        self._model = model
        self._device = device
        self._create_numerics = numerics
        self._numerics = ExitStack()
        self._eval_mode: ExitStack | None = None
        self._given_back = devices.record_event(device)

    @property
    def is_held(self) -> bool:
        """Return whether the model is in evaluation mode for this engine."""
        return self._eval_mode is not None

    def begin(self) -> None:
        """Wait for the work of the thread that trained, and install the operators of forwards."""
        # The model may have been trained in another stream than this thread's.
        devices.wait_event(self._given_back, self._device)
        self._numerics.enter_context(self._create_numerics())

    def hold(self) -> None:
        """Set evaluation mode until `release`."""
        self._eval_mode = ExitStack()
        self._eval_mode.enter_context(eval_mode(self._model))

    def release(self, settle: Callable[[], None]) -> bool:
        """Restore training flags and operators; return whether the model was held.

        Args:
            settle: waits for the work on the model; called before the flags are restored.
        """
        with self._numerics:
            if self._eval_mode is None:
                return False
            held = self._eval_mode
            self._eval_mode = None
            with devices.current(self._device), held:
                settle()
            return True

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend the released model to the calling thread, whose work `begin` waits for later."""
        devices.wait_event(self._given_back, self._device)
        try:
            yield
        finally:
            self._given_back = devices.record_event(self._device)
