"""Submit sequences to a persistent manager and receive their outputs, for one owner.

Owns the output queue that receives their outputs, so that no other caller takes them. Called from
one thread.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from cb_rollout.config.sampling import SamplingParams, equal_group_warning, resolved
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.output_queue import OutputQueue, OutputSink
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.prompts import Prompt, encoded
from cb_rollout.types import GenerationOutput


class Sampler(Protocol):
    """Interface that a collector needs of an engine."""

    @property
    def policy_version(self) -> int:
        """Return the version that tokens are stamped with now."""
        ...

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of one prompt, prefilled once; return their ids."""
        ...

    def take(self) -> GenerationOutput:
        """Wait for the next of these sequences to end."""
        ...

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End sequences early; each still delivers its tokens."""
        ...

    def sleep(self) -> None:
        """Stop the engine until `wake`; sequences in flight keep their tokens."""
        ...

    def wake(self) -> None:
        """Let the engine run."""
        ...


class RequestManager(Protocol):
    """Interface that requests are submitted to: an engine's manager, or a pool's."""

    @property
    def defaults(self) -> SamplingParams:
        """Return the sampling parameters of a request that has none."""
        ...

    def create_requests(
        self, inputs: Sequence[Any], params: Sequence[SamplingParams], *, members: Sequence[int]
    ) -> list[Request]:
        """Validate sequences."""
        ...

    def start(self) -> None:
        """Let requests run."""
        ...

    def submit(self, requests: Sequence[Request], sink: OutputSink) -> None:
        """Queue requests; their outputs go to `sink`."""
        ...

    def cancel_requests(self, request_ids: Sequence[str]) -> object:
        """End requests early."""
        ...

    def require_can_wait(self) -> None:
        """Raise where no output would come."""
        ...


class Generator(Protocol):
    """Part of `RolloutGenerator` that a stream uses."""

    tokenizer: Any

    @property
    def manager(self) -> RequestManager:
        """Return the manager that requests are submitted to."""
        ...

    @property
    def policy_version(self) -> int:
        """Return the version that tokens are stamped with now."""
        ...

    def sleep(self) -> None:
        """Release the KV memory and stop the engine."""
        ...

    def wake(self) -> None:
        """Let the engine run."""
        ...


class RequestStream:
    """A `Sampler` over a generator's manager."""

    def __init__(
        self,
        generator: Generator,
        sampling_params: SamplingParams | None = None,
        max_new_tokens: int | None = None,
    ) -> None:
        self._generator, self._manager = generator, generator.manager
        self._params = resolved(sampling_params, self._manager.defaults, max_new_tokens)
        self._output_queue = OutputQueue()

    @property
    def policy_version(self) -> int:
        """Return the version that tokens are stamped with now."""
        return self._generator.policy_version

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of one prompt; see `ContinuousBatchingManager.add_request`."""
        if warning := equal_group_warning(self._params, num_sequences):
            raise ConfigurationError(warning)
        (ids,) = encoded([prompt], self._generator.tokenizer)
        requests = self._manager.create_requests(
            [ids], [self._params], members=range(num_sequences)
        )
        self._manager.start()
        self._output_queue.reopen()
        self._manager.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def take(self) -> GenerationOutput:
        """Wait for the next sequence submitted here to end.

        Raises:
            EngineDeadError: the engine stopped on an exception.
            RolloutError: the engine is paused, so no sequence would end.
        """
        self._manager.require_can_wait()
        output = self._output_queue.take()
        assert output is not None, "a wait without a limit ended without an output"
        return output

    def cancel(self, request_ids: Sequence[str]) -> None:
        """End sequences early; each still delivers its tokens."""
        self._manager.cancel_requests(request_ids)

    def sleep(self) -> None:
        """Release the KV memory and stop the engine; sequences in flight keep their tokens."""
        self._generator.sleep()

    def wake(self) -> None:
        """Let the engine run."""
        self._generator.wake()
