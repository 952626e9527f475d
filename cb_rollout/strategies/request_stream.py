"""Submit sequences to a persistent manager and receive their outputs, for one owner.

Owns the output queue that receives their outputs, so that no other caller takes them. Called from
one thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cb_rollout.config.sampling import SamplingParams, equal_group_warning, resolved
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, EngineDeadError, RolloutError
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
        """Sample with a `RolloutGenerator` or `PooledGenerator`, whose parameters are defaults."""
        self._generator = generator
        self._manager = generator.manager
        # Called only to refuse invalid parameters.
        resolved(sampling_params, self._manager.defaults, max_new_tokens)
        self._sampling_params = sampling_params
        self._max_new_tokens = max_new_tokens
        self._output_queue = OutputQueue()
        self._step_until: Callable[..., None] | None = None

    @property
    def policy_version(self) -> int:
        return self._generator.policy_version

    def submit(self, prompt: Prompt, num_sequences: int) -> list[str]:
        """Queue completions of a prompt; see `ContinuousBatchingManager.add_request`."""
        self._manager.follow_generation_config()
        params = resolved(self._sampling_params, self._manager.defaults, self._max_new_tokens)
        warning = equal_group_warning(params, num_sequences)
        if warning:
            raise ConfigurationError(warning)
        (ids,) = encoded([prompt], self._generator.tokenizer)
        members = range(num_sequences)
        requests = self._manager.create_requests([ids], [params], members=members)
        self._manager.start()
        self._output_queue.reopen()
        self._manager.submit(requests, self._output_queue)
        return [request.request_id for request in requests]

    def wait(self) -> None:
        """Do nothing: `take` waits. A subclass may wait here, and let other threads act."""

    def take(self) -> GenerationOutput:
        """Wait for the next sequence to end; raises if the engine is paused or stopped."""
        self._manager.require_can_wait()
        if self._step_until is not None:
            self._step_until(lambda: self._output_queue.can_take)
        output = self._output_queue.take()
        assert output is not None
        return output

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step the engine in this thread, and only while `take` waits.

        Samples then do not depend on other threads. Has no effect on a pool.
        """
        if not self.has_own_engine:
            yield
            return
        with self._manager.loop.stepping() as step_until:
            self._step_until = step_until
            try:
                yield
            finally:
                self._step_until = None

    def state_dict(self) -> dict[str, Any]:
        """Return the unfinished sequences and the outputs not taken yet, for `torch.save`.

        Raises:
            RolloutError: an unfinished sequence is sampled under a grammar, or by a pool.
        """
        self._require_own_engine()
        return self._manager.saved_requests(self._output_queue)

    def load_state_dict(self, state: Mapping[str, Any], num_versions: int = 0) -> None:
        """Continue the sequences of a `state_dict`; add `num_versions` to their versions.

        Raises:
            RolloutError: the sequences are sampled by a pool.
        """
        self._require_own_engine()
        self._manager.start()
        self._output_queue.reopen()
        self._manager.restore_requests(state, self._output_queue, num_versions)

    @property
    def has_own_engine(self) -> bool:
        """True if an engine of this process samples; False: a pool does."""
        return hasattr(self._manager, "restore_requests")

    def _require_own_engine(self) -> None:
        if not self.has_own_engine:
            raise RolloutError(
                "the workers of a pool keep its unfinished sequences, which cannot be saved; "
                "collect or cancel them first."
            )

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
