"""Submit sequences to a persistent manager and receive their outputs, for one owner.

Owns the output queue that receives their outputs, so that no other caller takes them. Called from
one thread.
"""

from collections.abc import Sequence
from typing import Any

from cb_rollout.config.sampling import SamplingParams, equal_group_warning, resolved
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, EngineDeadError
from cb_rollout.rollout.prompts import Prompt, encoded
from cb_rollout.types import GenerationOutput


class RequestStream:
    """Completions of one owner's prompts, over a generator's manager."""

    def __init__(
        self,
        generator: Any,
        sampling_params: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        """Sample by a `RolloutGenerator` or a `PooledGenerator`, and its parameters by default."""
        self._generator, self._manager = generator, generator.manager
        self._params = resolved(sampling_params, self._manager.defaults, max_new_tokens)
        self._output_queue = OutputQueue()

    @property
    def policy_version(self) -> int:
        return self._generator.policy_version

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of a prompt; see `ContinuousBatchingManager.add_request`."""
        if warning := equal_group_warning(self._params, num_sequences):
            raise ConfigurationError(warning)
        (ids,) = encoded([prompt], self._generator.tokenizer)
        members = range(num_sequences)
        requests = self._manager.create_requests([ids], [self._params], members=members)
        self._manager.start()
        self._output_queue.reopen()
        self._manager.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def take(self) -> GenerationOutput:
        """Wait for the next sequence to end; raises if the engine is paused or stopped."""
        self._manager.require_can_wait()
        output = self._output_queue.take()
        assert output is not None
        return output

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End sequences early; each still delivers its tokens."""
        self._manager.cancel_requests(request_ids)

    def stop(self) -> None:
        """Make a `take` that waits on another thread raise `EngineDeadError`."""
        self._output_queue.close(EngineDeadError("the request stream was stopped."))

    def sleep(self) -> None:
        """Stop the engine; sequences in flight keep their tokens."""
        self._generator.sleep()

    def wake(self) -> None:
        self._generator.wake()
