"""GPU memory given back and taken again at the same addresses, so that CUDA graphs stay valid.

The only file that imports torch_memory_saver, which is no dependency. It ends the process where it
is asked wrongly: to resume what there is no memory for, or to free what is paused. So callers look
at what is free first, and whatever is paused is kept from being freed.
"""

import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)

_numbers = itertools.count()
# A tag for each pool: memory of a paused one must not serve another.

_PAUSED: dict[str, object] = {}
# What is paused, by tag, for as long as it is.


class MemorySaver:
    """Pauses pools of one process."""

    def __init__(self, library: Any) -> None:
        """Use torch_memory_saver's interface."""
        self._library = library

    @contextmanager
    def allocating(self) -> Iterator[str]:
        """What is allocated inside can be paused, under the tag that this gives."""
        tag = f"cb_rollout_{os.getpid()}_{next(_numbers)}"
        with self._library.region(tag=tag):
            yield tag

    def pause(self, tag: str, pool: object) -> None:
        """Give the memory of `pool` back; its contents are lost, its addresses kept."""
        _PAUSED[tag] = pool
        self._library.pause(tag)

    def resume(self, tag: str) -> Any:
        """Take the memory again, of which there must be enough; returns the pool."""
        self._library.resume(tag)
        return _PAUSED.pop(tag)


def create_saver(device: torch.device) -> MemorySaver | None:
    """What keeps addresses on `device`; None where nothing does."""
    if device.type != "cuda" or importlib.util.find_spec("torch_memory_saver") is None:
        return None
    library: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
    try:
        if "torch_memory_saver" not in os.environ.get("LD_PRELOAD", ""):
            # Its other way needs a library loaded before Python is.
            library.hook_mode = "torch"
        with library.region(tag="cb_rollout_trial"):
            torch.zeros(1, device=device)
    except (AssertionError, AttributeError, ImportError, OSError, RuntimeError) as error:
        logger.warning(
            "torch_memory_saver cannot be used (%s); the cache will be made anew.", error
        )
        return None
    return MemorySaver(library)
