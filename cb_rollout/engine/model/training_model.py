"""Follow the training model: its wrappers, and the function that its weights compute.

Called by the thread that steps the engine, or by a thread that paused it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cb_rollout.compat.module_state import (
    ComputedFunction,
    with_active_adapter,
    with_moved_adapters,
    with_wrappers_adapter,
)
from cb_rollout.compat.transformers import unwrap
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.model.trained_check import check_trained_model, wrapper_state


class TrainingModel:
    """The model that trains, seen from the engine that generates with its module or a copy of it.

    Owns the last seen state of the wrappers and of the generating module's weights and settings.
    """

    def __init__(self, module: torch.nn.Module, runner: ModelRunner) -> None:
        """Check nothing yet.

        Args:
            module: the training model, maybe wrapped.
            runner: runs the module that generates.
        """
        self.module = module
        self.is_copied = _share_no_parameter(runner.model, module)
        """True where training may change its weights while the copy generates."""
        self._runner = runner
        self._checked_wrappers: list[object] = []
        self._function = ComputedFunction(runner.model)

    def with_moved_adapters(self) -> AbstractContextManager[Any]:
        """Return a context in which adapters change the forward, so that a check sees them."""
        if self.is_copied:
            # A copy has its adapters merged as they are.
            return nullcontext()
        return with_moved_adapters(self.module)

    def check(self) -> None:
        """Compare the training model's own forward with the generating module's.

        Called inside `with_moved_adapters`, in the numerics of the runner.

        Raises:
            ConfigurationError: they differ by more than rounding.
        """
        check_trained_model(self._runner, self.module)

    def check_adapter(self, name: str) -> None:
        """Compare both forwards under one adapter, in the numerics of the runner; raise as `check`.

        Nothing is compared where a copy generates: adapters are merged into it, and the model may
        be training.

        Args:
            name: of an adapter that the runner is ready to run.
        """
        if self.is_copied:
            return
        with (
            self.with_moved_adapters(),
            self._runner.under_adapter(name),
            with_active_adapter(unwrap(self.module), name),
            with_wrappers_adapter(self.module, name),
        ):
            self.check()

    def remember_wrappers(self) -> None:
        """Treat the wrappers in their current state as checked."""
        self._checked_wrappers = wrapper_state(self.module)

    def check_wrappers(self) -> None:
        """Check again if a wrapper changed since `remember_wrappers`; raise as `check`."""
        state = wrapper_state(self.module)
        if state == self._checked_wrappers:
            return
        with self._runner.computing(), self.with_moved_adapters():
            self.check()
        self._checked_wrappers = state

    def follow(self, module: torch.nn.Module) -> None:
        """Follow a training model that was wrapped again, and check what its forward computes."""
        self.module = module
        # A copy has the weights of the last sync: it is compared after the next one.
        if not self.is_copied:
            self.check_wrappers()

    def has_changed(self, num_steps: int) -> bool:
        """Return whether the module that generates computes something else than at the last call.

        A write to a weight or a buffer changes it, and so do a setting and the active adapters. A
        copy changes only by a sync, and is not checked here.

        Args:
            num_steps: steps of the model's optimizers so far.
        """
        return not self.is_copied and self._function.has_changed(num_steps)

    def forget_function(self) -> None:
        """Treat the model's state at the next check as unchanged."""
        self._function.forget()


def _share_no_parameter(model: torch.nn.Module, trained: torch.nn.Module) -> bool:
    model_ids = {id(parameter) for parameter in model.parameters()}
    return model_ids.isdisjoint(id(parameter) for parameter in trained.parameters())
