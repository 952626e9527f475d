"""Run the clients' requests one after another on one thread, and keep their results.

Waiting samples run as one batch, even with different adapters. A request that is sent twice is one
job. Any thread may submit; results are read on the server's asyncio thread.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from cb_rollout.errors import InvalidRequestError, RolloutError, error_text
from cb_rollout.server.tinker.policies import MAX_SAMPLERS, SampleRequest, Samples

# Maximum number of results, and of their bytes, to keep for clients that ask for a result again.
MAX_RESULTS = 4096
MAX_RESULT_BYTES = 1 << 28

# Maximum number of ids to keep of requests whose results are forgotten: if a client sends such a
# request again, it must not run again.
MAX_FORGOTTEN = 1 << 20

# A client sends its samples one by one: wait this long for the next sample of a batch, and at most
# this long for all of them.
GATHER_SECONDS = 0.01
MAX_GATHER_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a job has no result."""

    message: str
    is_users: bool
    """True if the request itself is invalid, so that a retry fails too."""


@dataclass(slots=True, eq=False)
class Job:
    """One request of a client."""

    id: str
    result: Future[Any] = field(default_factory=Future)
    """A result of `run` or of a sample, or a `Failure`."""
    run: Callable[[], Any] | None = None
    """None: the job is a sample."""
    sampler: Hashable = None
    """Identifies the sampler of a sample."""
    sample: SampleRequest | None = None
    answer: Callable[[Samples], Any] | None = None
    """Makes the result of a sample."""

    def finish(self, result: Any) -> None:
        """Set the result, and release the client's data."""
        self.run = self.sample = self.answer = None
        self.result.set_result(result)

    def num_bytes(self) -> int:
        """Return the size of a bytes result; 0 for other results, which are small."""
        result = self.result.result() if self.result.done() else None
        return len(result) if isinstance(result, bytes) else 0


class Jobs:
    """A queue of jobs, and the thread that runs them."""

    def __init__(
        self, sample: Callable[[Sequence[tuple[Any, SampleRequest]]], list[Samples]]
    ) -> None:
        """Start the thread.

        `sample` completes prompts, each with its sampler, on this thread.
        """
        self._sample = sample
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._known: OrderedDict[str, Job] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cb_rollout tinker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job, unless a job with its id was queued before."""
        with self._changed:
            if job.id in self._known or job.id in self._forgotten:
                return
            self._known[job.id] = self._waiting[job.id] = job
            self._forget_oldest()
            self._changed.notify_all()

    def _forget_oldest(self) -> None:
        """Forget the oldest results until the rest are within the limits."""
        done = [job for job in self._known.values() if job.result.done()]
        num_kept = len(self._known)
        num_bytes = sum(job.num_bytes() for job in done)
        for job in done:
            if num_kept <= MAX_RESULTS and num_bytes <= MAX_RESULT_BYTES:
                break
            num_kept -= 1
            num_bytes -= job.num_bytes()
            del self._known[job.id]
            self._forgotten[job.id] = None
        while len(self._forgotten) > MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def get(self, job_id: str) -> Job | None:
        """Return a job that runs, waits, or has a result; None: the id is unknown.

        If the result was forgotten, the job has a `Failure`.
        """
        with self._changed:
            job = self._known.get(job_id)
            is_forgotten = job_id in self._forgotten
        if job is None and is_forgotten:
            job = Job(job_id)
            text = f"the result of request {job_id} is forgotten: too many came after it."
            job.finish(Failure(text, is_users=True))
        return job

    def cancel(self, job_id: str) -> None:
        """Remove a job from the queue; a running job continues."""
        with self._changed:
            job = self._waiting.pop(job_id, None)
        if job is not None:
            job.finish(Failure("the request was cancelled.", is_users=True))

    def close(self) -> None:
        """End the thread after the running job; waiting jobs fail."""
        with self._changed:
            self._is_closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for job in waiting:
            job.finish(Failure("the server was closed.", is_users=False))
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            first = batch[0]
            try:
                if first.run is not None:
                    results = [first.run()]
                else:
                    results = self._sampled(batch)
            except Exception as error:  # noqa: BLE001  the client is told
                results = [_failure(error)] * len(batch)
            for job, result in zip(batch, results, strict=True):
                job.finish(result)

    def _sampled(self, batch: Sequence[Job]) -> list[Any]:
        """Return the results of samples; a refused sample does not affect the others."""
        requests = [(job.sampler, job.sample) for job in batch if job.sample is not None]
        try:
            samples: list[Any] = list(self._sample(requests))
        except InvalidRequestError:
            # Nothing was sampled; run each job alone, because only one may be at fault.
            samples = [self._sampled_alone(job) for job in batch]
        results: list[Any] = []
        for job, sampled in zip(batch, samples, strict=True):
            assert job.answer is not None
            results.append(sampled if isinstance(sampled, Failure) else job.answer(sampled))
        return results

    def _sampled_alone(self, job: Job) -> Samples | Failure:
        assert job.sample is not None
        try:
            (samples,) = self._sample([(job.sampler, job.sample)])
        except RolloutError as error:
            return _failure(error)
        return samples

    def _next_batch(self) -> list[Job]:
        """Return the next job, with the samples to run with it; empty if the thread must stop."""
        with self._changed:
            while self._await_job():
                first = next(iter(self._waiting.values()))
                if first.run is not None:
                    del self._waiting[first.id]
                    return [first]
                self._gather()
                samples = _sampled_together(self._waiting.values())
                for job in samples:
                    del self._waiting[job.id]
                # Empty if all were cancelled meanwhile.
                if samples:
                    return samples
            return []

    def _await_job(self) -> bool:
        """Wait for a job; return False if the thread must stop."""
        while not self._waiting:
            if self._is_closed:
                return False
            self._changed.wait()
        return True

    def _gather(self) -> None:
        """Wait until no new job has arrived for a moment."""
        latest = monotonic() + MAX_GATHER_SECONDS
        while not self._is_closed and monotonic() < latest:
            if not self._changed.wait(GATHER_SECONDS):
                return


def _sampled_together(waiting: Iterable[Job]) -> list[Job]:
    """Return the samples at the head of the queue, and later ones of the same samplers.

    Behind another job, a sample of a new sampler must wait, because it may depend on a save before
    it. The number of samplers is limited by the adapters that fit in memory together.
    """
    samplers: set[Hashable] = set()
    samples: list[Job] = []
    is_first = True
    for job in waiting:
        if job.run is not None:
            is_first = False
            continue
        if is_first and len(samplers) < MAX_SAMPLERS:
            samplers.add(job.sampler)
        if job.sampler in samplers:
            samples.append(job)
    return samples


def _failure(error: Exception) -> Failure:
    return Failure(error_text(error), is_users=isinstance(error, InvalidRequestError))
