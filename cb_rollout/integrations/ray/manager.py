"""Submit sequences to a pool's workers, as `ContinuousBatchingManager` does to its engine.

Has the part of it that callers of both use. Owns nothing: validation is the input processor's, and
the sequences are the supervisor's. Called from any thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cb_rollout.config.combinations import refused
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import InputProcessor, ServingLimits
from cb_rollout.engine.service.output_queue import OutputSink
from cb_rollout.integrations.ray.supervisor import WorkerSupervisor
from cb_rollout.metrics.registry import EngineCounters, EngineStatus


@dataclass(frozen=True, slots=True)
class PoolManager:
    """The requests of one pool."""

    supervisor: WorkerSupervisor
    input_processor: InputProcessor
    defaults: SamplingParams
    """Sampling parameters where a request has none."""

    group: ClassVar[None] = None
    """No process shares the layers of a worker's model."""
    routers: ClassVar[None] = None
    """Routers are the workers' own."""

    @property
    def limits(self) -> ServingLimits:
        """Return the bounds of the model and of every worker's KV cache on a request."""
        return self.input_processor.limits

    @property
    def counters(self) -> EngineCounters:
        """Return the totals of all workers that ever ran, as last reported; peaks are left out."""
        return self.supervisor.counters()

    def status(self) -> EngineStatus:
        """Return the pool's state; the KV memory is that of this process, which has none."""
        num_assigned, num_waiting = self.supervisor.num_sequences()
        return EngineStatus(
            requests_running=num_assigned,
            requests_waiting=num_waiting,
            kv_blocks_used=0,
            kv_blocks=0,
            kv_bytes=0,
            policy_version=self.supervisor.policy_version,
        )

    def create_requests(self, inputs: Sequence[Any], *arguments: Any, **more: Any) -> list[Request]:
        """Validate sequences; see `InputProcessor.requests`.

        Raises:
            InvalidRequestError: a sequence could never be served.
            ConfigurationError: an input has images.
        """
        requests = self.input_processor.requests(inputs, *arguments, **more)
        if any(request.images is not None for request in requests):
            raise refused("pool, images")
        return requests

    def start(self) -> None:
        """Do nothing: the workers run until the pool is closed."""

    def require_can_wait(self) -> None:
        """Raise `EngineDeadError` where no output would come."""
        self.supervisor.require_alive()

    def submit(self, requests: Iterable[Request], sink: OutputSink) -> None:
        """Queue requests; each delivers one output to `sink`.

        Raises:
            EngineDeadError: the pool was closed, or no worker can run.
        """
        self.supervisor.submit(requests, sink)

    def cancel_requests(self, request_ids: Iterable[str]) -> None:
        """End sequences; each delivers the tokens that its worker reported."""
        self.supervisor.cancel(request_ids)
