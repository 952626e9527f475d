"""Sequences in flight over a persistent manager, for one owner.

Owns the output_queue that their outputs come to, so that nobody else's are taken. Called from one
thread.
"""

from collections.abc import Sequence
from typing import Protocol

from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.rollout.prompts import Prompt, encoded
from cb_rollout.types import GenerationOutput


class Sampler(Protocol):
    """What a collector needs of an engine."""

    @property
    def policy_version(self) -> int:
        """The version that tokens are stamped with now."""
        ...

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of one prompt, computed once; returns their ids."""
        ...

    def take(self) -> GenerationOutput:
        """The next sequence to end, of those submitted here."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End sequences early; each still delivers what it has."""
        ...

    def hold(self) -> None:
        """Keep the engine still until the next `submit` or `let_go`."""
        ...

    def let_go(self) -> None:
        """Let the engine run."""
        ...


class Flight:
    """A `Sampler` over a generator's manager."""

    def __init__(
        self,
        generator: RolloutGenerator,
        sampling_params: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """Start with nothing in flight."""
        self._generator, self._tokenizer = generator, generator.tokenizer
        self._manager = generator.manager
        self._params = resolved(sampling_params, self._manager.defaults, max_new_tokens)
        self._output_queue = OutputQueue()

    @property
    def policy_version(self) -> int:
        """The version that tokens are stamped with now."""
        return self._generator.policy_version

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of one prompt; see `ContinuousBatchingManager.add_request`."""
        (ids,) = encoded([prompt], self._tokenizer)
        requests = self._manager.input_processor.requests(
            [ids] * num_sequences, [self._params] * num_sequences, members=range(num_sequences)
        )
        self._manager.start()
        self._output_queue.reopen()
        self._manager.loop.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def take(self) -> GenerationOutput:
        """The next sequence to end, of those submitted here.

        Raises:
            EngineDeadError: the engine stopped on an exception.
            RolloutError: the engine is held still, so nothing would come.
        """
        self._manager.loop.pause_controller.require_open_for_me()
        output = self._output_queue.take()
        assert output is not None, "a wait without a limit ended without an output"
        return output

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End sequences early; each still delivers what it has."""
        self._manager.loop.cancel(request_ids)

    def hold(self) -> None:
        """Give the KV memory back and keep still; what is in flight waits with its tokens."""
        self._generator.sleep()

    def let_go(self) -> None:
        """Let the engine run."""
        self._generator.wake()
