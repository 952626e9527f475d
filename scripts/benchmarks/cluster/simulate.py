"""The workload `simulate`: the simulator held against runs on two workers, then scenarios.

The speeds of the workers are measured while both compute, as they do in the runs. The trainer's
part of a step is a sleep: it stands for a trainer on a machine of its own. Lengths are forced, and
the simulator gets the same ones.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from benchmarks.cluster.pool import PARAMS, opened, ray_cluster
from benchmarks.cluster.scenarios import scenarios
from benchmarks.cluster.simulation import (
    NUM_WARM_UPS,
    Mode,
    Scenario,
    Speeds,
    simulate,
)
from benchmarks.sizes import Setup, Sizes
from cb_rollout.integrations.ray import RolloutPool
from cb_rollout.tools.bench import SEED, create_model, long_tailed_lengths, random_prompts, timed

NOTE = (
    "Rows of `scenarios` are simulated, with assumed speeds; rows of `simulated` are simulated and "
    "measured in this run."
)

NUM_WORKERS = 2
MAX_STALENESS = 2

# Share of a rollout's time that the trainer takes in the runs.
TRAIN_SHARE = 0.5

# In terms of the timed collections of `strategies`: workers trace in the first ones.
STEPS = 3

SCENARIO_STEPS = 5


def bench_simulate(setup: Setup) -> dict[str, Any]:
    """Return predicted and measured steps of runs on two workers, and scenarios."""
    sizes = setup.sizes
    model = create_model(sizes.shape, setup.device)
    with ray_cluster(setup), opened(model, NUM_WORKERS) as pool:
        runs = _Runs(pool, model, sizes)
        speeds, overhead = _measured_speeds(runs)
        sync = statistics.median(timed(runs.sync) for _ in range(5))
        train = TRAIN_SHARE * statistics.median(
            timed(lambda: runs.rollout(sizes.num_prompts)) for _ in range(3)
        )
        scenario = Scenario(
            mode=Mode.WAITING, speeds=speeds, num_engines=NUM_WORKERS,
            num_groups=sizes.num_prompts, group_size=sizes.num_completions,
            prompt_tokens=statistics.mean(sizes.prompt_tokens), draw_length=_drawn,
            train=train, rollout_overhead=overhead, sync=sync, max_staleness=MAX_STALENESS,
        )  # fmt: skip
        results = {}
        for mode, run in ((Mode.WAITING, runs.waiting), (Mode.OVERLAPPING, runs.overlapping)):
            num_steps = STEPS * sizes.strategy_steps
            seconds = run(train, num_steps)
            wanted = replace(scenario, mode=mode, draw_length=_repeated(runs.lengths()))
            predicted = simulate(wanted, num_steps)
            ratio = predicted.step_seconds / seconds
            results[f"{mode}, two workers"] = {
                "seconds_measured": seconds,
                "seconds_simulated": predicted.step_seconds,
                "simulated_over_measured": ratio,
                "staleness_simulated": predicted.staleness_mean,
            }
            print(f"  {mode}: {seconds:.2f} s measured, {ratio:.2f} of it simulated", flush=True)
    return {
        "simulated": results,
        "scenarios": {
            name: _figures(simulate(one, SCENARIO_STEPS))
            for name, one in scenarios(sizes.simulated_gpus).items()
        },
    }


def _figures(prediction: Any) -> dict[str, float]:
    return asdict(prediction)


def _drawn(draws: random.Random) -> int:
    raise AssertionError("each run has its own lengths")


def _repeated(lengths: Iterator[int]) -> Callable[[random.Random], int]:
    return lambda _: next(lengths)


class _Runs:
    """Training runs on a pool, with forced lengths."""

    def __init__(self, pool: RolloutPool, model: Any, sizes: Sizes) -> None:
        self.pool, self.model, self.sizes = pool, model, sizes
        draws = random.Random(SEED)
        self.prompts = random_prompts(draws, 512, sizes.prompt_tokens, sizes.shape["vocab_size"])
        self._groups = self.groups()

    def lengths(self) -> Iterator[int]:
        """Yield the lengths of a run, in order."""
        for seed in itertools.count():
            yield from long_tailed_lengths(
                random.Random(seed), self.sizes.num_completions, self.sizes.log_mean_tokens,
                self.sizes.longest,
            )  # fmt: skip

    def groups(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield prompts with the lengths of their groups."""
        lengths = self.lengths()
        for prompt in itertools.cycle(self.prompts):
            yield prompt, list(itertools.islice(lengths, self.sizes.num_completions))

    def sync(self) -> None:
        self.pool.sync_weights(self.model)

    def rollout(self, num_groups: int) -> None:
        """Sample the next groups of a run."""
        found = list(itertools.islice(self._groups, num_groups))
        prompts = [prompt for prompt, lengths in found for _ in lengths]
        lengths = [length for _, lengths in found for length in lengths]
        self.sample(prompts, lengths)

    def sample(self, prompts: list[list[int]], lengths: list[int]) -> None:
        outputs = self.pool.generate_batch(prompts, sampling_params=PARAMS, max_new_tokens=lengths)
        assert [len(o.generated_tokens) for o in outputs.values()] == lengths

    def waiting(self, train: float, num_steps: int) -> float:
        """Return the seconds of a step of a loop that waits for its rollout."""
        self._groups = self.groups()
        started = 0.0
        for step in range(NUM_WARM_UPS + num_steps):
            if step == NUM_WARM_UPS:
                started = time.perf_counter()
            self.rollout(self.sizes.num_prompts)
            time.sleep(train)
            self.sync()
        return (time.perf_counter() - started) / num_steps

    def overlapping(self, train: float, num_steps: int) -> float:
        """Return the seconds of a step of a loop that samples ahead."""
        max_groups = MAX_STALENESS * self.sizes.num_prompts
        groups, is_over = self.groups(), threading.Event()
        lock, may_begin = threading.Lock(), threading.Semaphore(max_groups)
        complete = threading.Semaphore(0)

        def produce() -> None:
            while True:
                may_begin.acquire()
                if is_over.is_set():
                    return
                with lock:
                    prompt, lengths = next(groups)
                self.sample([prompt] * len(lengths), lengths)
                complete.release()

        with ThreadPoolExecutor(max_groups) as threads:
            producers = [threads.submit(produce) for _ in range(max_groups)]
            started = 0.0
            for step in range(NUM_WARM_UPS + num_steps):
                if step == NUM_WARM_UPS:
                    started = time.perf_counter()
                for _ in range(self.sizes.num_prompts):
                    complete.acquire()
                for _ in range(self.sizes.num_prompts):
                    may_begin.release()
                time.sleep(train)
                self.sync()
            seconds = time.perf_counter() - started
            is_over.set()
            may_begin.release(max_groups)
        for producer in producers:
            producer.result()
        return seconds / num_steps


def _measured_speeds(runs: _Runs) -> tuple[Speeds, float]:
    """Return the speeds of a worker while both compute, and a rollout's other seconds."""
    sizes, prompts = runs.sizes, runs.prompts
    short, long = sizes.equal_tokens // 2, sizes.equal_tokens * 2

    def seconds(num_rows: int, num_tokens: int, repeat: int = 1) -> float:
        """Time rows of distinct prompts on each worker."""
        count = num_rows * NUM_WORKERS
        wanted = [prompt * repeat for prompt in prompts[:count]]
        runs.sample(wanted, [num_tokens] * count)
        found = []
        for _ in range(2):
            # New weights, since a worker keeps a prompt's keys.
            runs.sync()
            found.append(timed(lambda: runs.sample(wanted, [num_tokens] * count)))
        return min(found)

    steps, base = [], 0.0
    # As many as may run on a worker.
    most = MAX_STALENESS * sizes.num_sequences // NUM_WORKERS
    rows = [2**n for n in range(20) if 2**n <= most]
    for num_rows in rows:
        fast, slow = seconds(num_rows, short), seconds(num_rows, long)
        steps.append((num_rows, max(1e-6, (slow - fast) / (long - short))))
        base = fast
    most = rows[-1]
    num_tokens = sum(map(len, prompts[: most * NUM_WORKERS])) / NUM_WORKERS
    prefill = max(0.0, (seconds(most, short, repeat=2) - base) / num_tokens)
    overhead = base - steps[-1][1] * short - prefill * num_tokens
    return Speeds(steps=steps, prefill=prefill, num_slots=10_000), max(0.0, overhead)
