"""The workload `scaling`: throughput by concurrent requests, and memory of waiting requests.

Completions are short, and a contender is left out of a point where its turn would be long, so that
the whole takes less than four minutes.
"""

import gc
import linecache
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cb_rollout
from benchmarks.harness.contenders import Contender, generate, ours, transformers_batching
from benchmarks.harness.timing import Turn, take_turn, throughput
from benchmarks.harness.workload import equal_lengths
from benchmarks.sizes import Setup
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.tools.bench import SEED, Workload, create_model

# Larger batches of `generate` are slower on the CPU model.
LARGEST_BATCH = 128

# A warm-up has few tokens. Our engine made its trace before.
LARGEST_WARM_UP, NUM_WARM_UPS = 64, 3

# No further repetition of a point begins after this time.
POINT_SECONDS = 12.0

# A contender that would take longer, at the rate of its last point, is left out.
LONGEST_TURN_SECONDS = 45.0

# Limit of the bytes that a waiting request may take besides its tokens.
REQUEST_BYTES = 2048

# Number of code lines that are listed with the bytes they allocated.
NUM_ALLOCATORS = 8

# Two lengths: the slope between them gives the bytes a token, the rest is the request's own.
PROMPT_TOKENS = 32, 96

PACKAGE = Path(cb_rollout.__file__).parent


def bench_scaling(setup: Setup) -> dict[str, Any]:
    """Return tokens per second by concurrent requests, and bytes of a waiting request."""
    model = create_model(setup.sizes.shape, setup.device)
    rates: dict[str, float] = {}
    results = {}
    for count in setup.sizes.scales:
        workload = equal_lengths(
            replace(
                setup.sizes,
                num_prompts=count,
                num_completions=1,
                equal_tokens=setup.sizes.scaling_tokens,
            )
        )
        contenders = {
            "cb_rollout": ours(),
            "transformers CB": transformers_batching(max_requests_per_batch=count),
            "model.generate": generate(setup.batch_size or min(count, LARGEST_BATCH)),
        }
        for name in list(contenders):
            if not _is_feasible(name, rates, workload):
                del contenders[name]
        print(f"scaling: {count} requests")
        turns = _turns(contenders, model, workload, setup.repetitions)
        results[f"{count} requests"] = point = {
            name: throughput(contender, turns[name], workload.num_tokens)
            for name, contender in contenders.items()
        }
        rates |= {name: figures["median"] for name, figures in point.items()}
    return results | _waiting_bytes(model, max(setup.sizes.num_waiting))


def _is_feasible(name: str, rates: dict[str, float], workload: Workload) -> bool:
    if name not in rates or workload.num_tokens / rates[name] <= LONGEST_TURN_SECONDS:
        return True
    print(f"  {name} is left out: it would take more than {LONGEST_TURN_SECONDS:.0f} s")
    return False


def _turns(
    contenders: dict[str, Contender], model: Any, workload: Workload, repetitions: int
) -> dict[str, list[Turn]]:
    """Take at least one turn each, and no further ones after `POINT_SECONDS`."""
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    warm_up = Workload(workload.prompts[:LARGEST_WARM_UP], workload.lengths[:LARGEST_WARM_UP])
    for _ in range(repetitions):
        for name, contender in contenders.items():
            turns[name].append(take_turn(contender, model, workload, warm_up, NUM_WARM_UPS))
            print(f"  {name:<28}{turns[name][-1].seconds:8.2f} s", flush=True)
        if sum(turn.seconds for taken in turns.values() for turn in taken) > POINT_SECONDS:
            break
    return turns


def _waiting_bytes(model: Any, count: int) -> dict[str, Any]:
    # The first call in a process allocates what later ones find, and is not counted.
    _bytes_per_request(model, count, PROMPT_TOKENS[0])
    short, _ = _bytes_per_request(model, count, PROMPT_TOKENS[0])
    long, lines = _bytes_per_request(model, count, PROMPT_TOKENS[1])
    per_token = (long - short) / (PROMPT_TOKENS[1] - PROMPT_TOKENS[0])
    return {
        "waiting": {
            "requests": count,
            "bytes a request beside its tokens": short - per_token * PROMPT_TOKENS[0],
            "bytes a token": per_token,
            "bytes a request, asked at most": REQUEST_BYTES,
        },
        f"held by, bytes a request of {PROMPT_TOKENS[1]} tokens": lines,
    }


def _bytes_per_request(model: Any, count: int, num_tokens: int) -> tuple[float, dict[str, float]]:
    """Return the bytes of each of `count` waiting requests, and those of the top code lines."""
    config = cb_rollout.RolloutConfig(seed=SEED)
    manager = ContinuousBatchingManager(model, continuous_batching_config=config)
    params = cb_rollout.SamplingParams(max_new_tokens=8, ignore_eos=True)
    vocab_size = model.config.vocab_size
    prompts = [[2 + (i + j) % (vocab_size - 2) for j in range(num_tokens)] for i in range(count)]
    # The first request allocates what all of them share.
    manager.add_requests(prompts[:1], sampling_params=params)
    with _allocations() as before:
        manager.add_requests(prompts, sampling_params=params)
        gc.collect()
        lines = tracemalloc.take_snapshot().compare_to(before, "lineno")
    top = {_code_line(line.traceback[0]): line.size_diff / count for line in lines[:NUM_ALLOCATORS]}
    return sum(line.size_diff for line in lines) / count, top


@contextmanager
def _allocations() -> Iterator[tracemalloc.Snapshot]:
    gc.collect()
    tracemalloc.start()
    try:
        yield tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()


def _code_line(frame: tracemalloc.Frame) -> str:
    if frame.filename == "<string>":
        return f"<a dataclass's __init__>:{frame.lineno}"
    path = Path(frame.filename)
    name = path.relative_to(PACKAGE.parent) if path.is_relative_to(PACKAGE) else path.name
    return f"{name}:{frame.lineno} {linecache.getline(frame.filename, frame.lineno).strip()}"
