"""Run a model under the adapter that a sequence names, and list the available adapters.

Owns the port `AdapterSource`, and its implementation for adapters inside the generating model. A
copy with merged adapters has another implementation (`weights/merged.py`). Trains nothing, and
merges nothing in place. Called by the thread that steps the engine, or by a thread that paused it.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from cb_rollout.compat.module_state import (
    adapter_names,
    merged_adapters,
    rows_adapters,
    with_active_adapter,
    with_adapter_of_each_row,
)
from cb_rollout.errors import ConfigurationError


class AdapterSource(Protocol):
    """The adapters that sequences may name."""

    def names(self) -> Sequence[str]:
        """Return the names of the adapters; any thread may call."""
        ...

    def prepare(self, names: Sequence[str]) -> bool:
        """Get ready to run adapters, while the engine is paused.

        Returns:
            Whether weights were read that no sync has read, so that a policy version must begin.

        Raises:
            ConfigurationError: an adapter cannot run here.
        """
        ...

    def activated(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the generating model computes with a single adapter.

        Raises:
            ConfigurationError: there is no such adapter, or it cannot run here.
        """
        ...

    def mixed(self, names: Sequence[str | None]) -> AbstractContextManager[None] | None:
        """Return a context in which one forward computes each row with its own adapter.

        Rows are the first axis of each layer's input. None: there is no such forward.

        Args:
            names: the adapter of each row; None: the active adapters.
        """
        ...


class LayerAdapters:
    """The unmerged adapters of the PEFT layers inside the generating model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Read nothing yet.

        Args:
            model: generates; unwrapped.
        """
        self._model = model

    def names(self) -> Sequence[str]:
        return adapter_names(self._model)

    def prepare(self, names: Sequence[str]) -> bool:
        for name in names:
            self._require_runnable(name)
        return False

    def activated(self, name: str) -> AbstractContextManager[None]:
        return self._activated(name)

    @contextmanager
    def _activated(self, name: str) -> Iterator[None]:
        self._require_runnable(name)
        with with_active_adapter(self._model, name):
            yield

    def mixed(self, names: Sequence[str | None]) -> AbstractContextManager[None] | None:
        of_rows = rows_adapters(self._model, names)
        if of_rows is None or merged_adapters(self._model):
            return None
        return with_adapter_of_each_row(self._model, of_rows)

    def _require_runnable(self, name: str) -> None:
        require_adapter(name, self.names())
        require_unmerged(name, self._model)


def require_adapter(name: str, names: Sequence[str]) -> None:
    """Raise `ConfigurationError` for an adapter that the model lacks, or no longer has."""
    if name not in names:
        raise ConfigurationError(
            f"the adapter {name!r} of a sequence is not in the model, which has "
            f"{', '.join(names) or 'none'}; was it deleted, or is this another model?"
        )


def require_unmerged(name: str, model: torch.nn.Module) -> None:
    """Raise `ConfigurationError` if adapters are merged into a model's weights in place."""
    merged = merged_adapters(model)
    if merged:
        raise ConfigurationError(
            f"adapter={name!r} cannot run while {', '.join(merged)} is merged into the model's "
            "weights in place; call unmerge_adapter() first."
        )
