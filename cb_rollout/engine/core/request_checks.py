"""Compare a model with its plain forward on the images or the adapter of a request.

Called by a thread that paused the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from cb_rollout.engine.core.paged_model import PagedModel
from cb_rollout.engine.images.check import ImageChecks
from cb_rollout.engine.model.training_model import TrainingModel
from cb_rollout.engine.request import Request

_Result = TypeVar("_Result")


class RequestChecks:
    """The kinds of images and the adapters on which an engine has compared its model."""

    def __init__(
        self,
        paged_model: PagedModel,
        training_model: TrainingModel,
        release_cache: Callable[[], None],
    ) -> None:
        """Compare nothing yet.

        Args:
            paged_model: generates.
            training_model: what the model is compared with.
            release_cache: releases the memory of the KV cache, which the next step allocates again.
        """
        self.images = ImageChecks(paged_model.runner)
        self._paged_model = paged_model
        self._training_model = training_model
        self._release_cache = release_cache
        self._adapters: set[str] = set()

    def check_images(self, request: Request) -> None:
        """Raise `ConfigurationError` if the model takes no images, or computes them differently."""
        with self._paged_model.runner.computing():
            self._retried(lambda: self.images.check(request, self._paged_model.layout))

    def unchecked_adapters(self, names: Iterable[str | None]) -> list[str]:
        """Return the distinct adapters that `check_adapters` has not accepted yet."""
        return sorted({name for name in names if name and name not in self._adapters})

    def check_adapters(self, names: Sequence[str]) -> bool:
        """Prepare adapters, and compare each with the training model's forward.

        Returns:
            Whether their weights were read now, so that a new policy version must begin.

        Raises:
            ConfigurationError: an adapter cannot run, or differs from the training model's forward.
        """
        runner = self._paged_model.runner
        with runner.computing():
            is_read = self._retried(lambda: runner.adapters.prepare(names))
            for name in names:
                self._training_model.check_adapter(name)
        self._adapters.update(names)
        return is_read

    def forget(self) -> None:
        """Compare everything again: under another layout, a later check may accept more or less."""
        self.images.forget()
        self._adapters.clear()

    def forget_deleted_adapters(self) -> None:
        """Forget deleted adapters: a later adapter of the same name may be a different one."""
        self._adapters.intersection_update(self._paged_model.runner.adapters.names())

    def _retried(self, run: Callable[[], _Result]) -> _Result:
        """Run once; if memory runs out, release the cache and run again."""
        try:
            return run()
        except torch.OutOfMemoryError:
            self._release_cache()
            return run()
