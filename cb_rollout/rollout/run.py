"""One rollout: requests in, their outputs back, and the figures of how it went.

Owns the wait of the training thread, and that nothing keeps running where it is interrupted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.metrics.registry import rollout_metrics
from cb_rollout.types import GenerationOutput

PROGRESS_SECONDS = 0.25
# How often a progress bar moves while nothing finishes.


def run_rollout(
    manager: ContinuousBatchingManager, requests: list[Request], progress_bar: bool
) -> tuple[dict[str, GenerationOutput], dict[str, float]]:
    """Run requests to their end, in a manager that is started if need be.

    Returns:
        Outputs by request id, in the order of `requests`; and the rollout's metrics by name.
    """
    manager.start()
    with measured(manager) as metrics:
        finished = _finished(manager, requests, progress_bar) if requests else {}
    return {request.request_id: finished[request.request_id] for request in requests}, metrics


@contextmanager
def measured(manager: ContinuousBatchingManager) -> Iterator[dict[str, float]]:
    """Fills a dictionary with the figures of what the engine did inside, by metric name."""
    counters = manager.counters
    before = counters.copy()
    counters.kv_blocks_peak = 0
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    yield metrics
    seconds = time.perf_counter() - started
    metrics |= rollout_metrics(counters.since(before), seconds)


def _finished(
    manager: ContinuousBatchingManager, requests: list[Request], progress_bar: bool
) -> dict[str, GenerationOutput]:
    """Every request's output; an exception in the wait cancels what is unfinished."""
    output_queue = OutputQueue()
    finished: dict[str, GenerationOutput] = {}
    counters = manager.counters
    tokens_before = counters.tokens_generated
    manager.require_can_wait()
    with tqdm(total=len(requests), desc="rollout", unit="seq", disable=not progress_bar) as bar:
        try:
            with manager.stepping() as step_until:
                manager.submit(requests, output_queue)
                while len(finished) < len(requests):
                    refresh = time.monotonic() + PROGRESS_SECONDS
                    if step_until is not None:
                        step_until(
                            lambda at=refresh: output_queue.has_news or time.monotonic() > at
                        )
                    output = output_queue.take(timeout=0.0 if step_until else PROGRESS_SECONDS)
                    if output is not None:
                        finished[output.request_id] = output
                        bar.update(1)
                    if progress_bar:
                        num_tokens = counters.tokens_generated - tokens_before
                        bar.set_postfix(tokens=num_tokens, refresh=output is None)
        except BaseException:
            # The caller gets its model back before it gets the exception.
            manager.abort([request.request_id for request in requests])
            raise
    return finished
