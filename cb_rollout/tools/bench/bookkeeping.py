"""What a decode step takes beside its forward and sampling, and whether waiting requests matter."""

import statistics
from typing import Any

import cb_rollout
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.seams import COARSE, FORWARD, SAMPLING
from cb_rollout.tools.bench.sizes import SEED, Setup
from cb_rollout.tools.bench.spans import watched
from cb_rollout.tools.bench.turns import synchronize, timed

MAX_NEW_TOKENS = 400
# Longer than is stepped, so that no sequence ends.


def bench(setup: Setup) -> dict[str, Any]:
    """Seconds of a decode step, and the share that is neither forward nor sampling."""
    return {f"{count} waiting": _measured(setup, count) for count in setup.sizes.num_waiting}


def _measured(setup: Setup, num_waiting: int) -> dict[str, float]:
    num_rows = setup.sizes.bookkeeping_rows
    engine, running = _decoding(setup, num_rows, num_waiting)
    totals, shares = [], []
    with watched(COARSE, synchronize) as spans:
        for _ in range(10 * setup.repetitions):
            spans.clear()
            totals.append(timed(engine.step))
            shares.append(1 - spans.within(FORWARD, SAMPLING) / totals[-1])
    assert not any(request.status.is_final for request in running), "a sequence ended meanwhile"
    engine.abandon()
    return {
        "step_milliseconds": 1000 * statistics.median(totals),
        "bookkeeping_percent": 100 * statistics.median(shares),
    }


def _decoding(setup: Setup, num_rows: int, num_waiting: int) -> tuple[Any, list[Any]]:
    """An engine with so many sequences decoding and waiting, and those that decode."""
    model = create_model(setup.sizes.shape, setup.device)
    config = cb_rollout.RolloutConfig(seed=SEED, max_requests_per_batch=num_rows)
    manager = ContinuousBatchingManager(model, continuous_batching_config=config)
    params = cb_rollout.SamplingParams(ignore_eos=True, max_new_tokens=MAX_NEW_TOKENS)
    count, vocab_size = num_rows + num_waiting, model.config.vocab_size
    prompts = [[2 + i % (vocab_size - 2), 2 + i // (vocab_size - 2)] for i in range(count)]
    requests = manager.input_processor.requests(prompts, [params] * count)
    for request in requests:
        manager.engine.add(request)
    running = requests[:num_rows]
    while not all(request.num_generated for request in running):
        manager.engine.step()
    return manager.engine, running
