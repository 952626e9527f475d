"""What drafts bring to few requests: where a model repeats itself, and where nothing comes twice.

A model of random weights repeats itself when it is greedy, and never at temperature 1: the best
case and the worst.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench.contenders import Contender, Run
from cb_rollout.tools.bench.model import create_model
from cb_rollout.tools.bench.sizes import SEED, Setup
from cb_rollout.tools.bench.turns import interleaved, throughput
from cb_rollout.tools.bench.workload import Workload, random_prompts

NUM_REQUESTS = (1, 4, 8)
# No step of more has drafts.

NUM_WARM_UPS = 4
# A forward is traced after 64 steps, and with drafts a rollout has few.

TEMPERATURES = {"greedy": 0.0, "at temperature 1": 1.0}


def bench(setup: Setup) -> dict[str, Any]:
    """Tokens per second with drafts and without."""
    sizes = setup.sizes
    model = create_model(sizes.shape, setup.device)
    draws = random.Random(SEED)
    results = {}
    for said, temperature in TEMPERATURES.items():
        contenders = {
            "cb_rollout": _rolling_out(temperature),
            "cb_rollout, no drafts": _rolling_out(temperature, num_speculative_tokens=0),
        }
        for count in NUM_REQUESTS:
            prompts = random_prompts(draws, count, sizes.prompt_tokens, sizes.shape["vocab_size"])
            workload = Workload(prompts, [sizes.longest_in_step] * count)
            print(f"drafts, {said}: {count} requests, {workload.num_tokens} tokens")
            turns = interleaved(contenders, model, workload, setup.repetitions, NUM_WARM_UPS)
            results[f"{count} requests, {said}"] = {
                name: throughput(contender, turns[name], workload.num_tokens)
                for name, contender in contenders.items()
            }
    return results


def _rolling_out(temperature: float, **settings: Any) -> Contender:
    params = SamplingParams(ignore_eos=True, temperature=temperature)

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del workload

        def run(part: Workload) -> None:
            generator.generate_batch(
                part.prompts, sampling_params=params, max_new_tokens=part.lengths
            )

        with RolloutGenerator(model, RolloutConfig(seed=SEED, **settings)) as generator:
            yield run

    said = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Contender(create, f"its defaults{said and f', {said}'}; temperature {temperature}")
