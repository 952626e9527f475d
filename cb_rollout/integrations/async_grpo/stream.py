"""A collector's two ends in an asynchronous run: a flight that can be ended, and what is in it."""

import threading
from collections.abc import Callable
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.strategies import Group, RequestStream, Strategy
from cb_rollout.types import GenerationOutput

POLL_SECONDS = 0.2
# How often a wait looks whether the run is over.


class Stopped(Exception):
    """The run is over; ends the thread."""


class StoppableStream(RequestStream):
    """A flight that ends with the run."""

    def __init__(
        self, generator: RolloutGenerator, params: SamplingParams, is_stopping: threading.Event
    ) -> None:
        """Watch `is_stopping`."""
        super().__init__(generator, params)
        self._is_stopping = is_stopping

    def submit(self, prompt: Any, num_sequences: int) -> list[str]:
        """Queue completions, unless the run is over."""
        if self._is_stopping.is_set():
            raise Stopped
        return super().submit(prompt, num_sequences)

    def take(self) -> GenerationOutput:
        """The next sequence to end, unless the run is over."""
        while (output := self._output_queue.take(timeout=POLL_SECONDS)) is None:
            if self._is_stopping.is_set():
                raise Stopped
        return output


class Asynchronous(Strategy):
    """A strategy whose groups are always carried, as many as may be in flight."""

    carries = True

    def __init__(
        self, strategy: Strategy, max_staleness: int, num_groups_allowed: Callable[[], int]
    ) -> None:
        """Keep as many groups in flight as `num_groups_allowed` says at each time."""
        self._strategy, self._num_groups_allowed = strategy, num_groups_allowed
        self.max_staleness = max_staleness
        self.num_extra_members = strategy.num_extra_members
        self.max_dropped_groups = strategy.max_dropped_groups
        self.max_retries = strategy.max_retries
        self.min_group_size = strategy.min_group_size

    @property
    def num_extra_groups(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those in flight beyond the one that is waited for."""
        return self._num_groups_allowed() - 1

    def keeps(self, group: Group) -> bool:
        """As the strategy says."""
        return self._strategy.keeps(group)
