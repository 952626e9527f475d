"""Print the speed of SmolLM2-135M-Instruct's prefill and decode steps, compiled and not.

Each setting of compilation takes its turn on the same prompts; ratios are to the first setting that
runs. The first rollouts compile, and are not timed. A setting that fails prints its reason, and a
path that was given up prints why. Nothing else may run.

python scripts/measure/compiled.py                 # minutes for each setting
python scripts/measure/compiled.py --settings uncompiled level-1 --repetitions 5
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from smollm2 import smollm2_folder

DYNAMIC = {"mode": None, "dynamic": True}

SETTINGS: dict[str, dict[str, Any]] = {
    "uncompiled": {"use_default_compile_configs": False},
    "engine's own": {"use_default_compile_configs": True},
    "prefill": {"varlen_compile_config": DYNAMIC, "use_default_compile_configs": False},
    "decode": {"decode_compile_config": DYNAMIC},
    "level-1": {"default_compile_level": 1},
    "level-2": {"default_compile_level": 2},
    "level-3": {"default_compile_level": 3},
}

# Parts of an engine, as it names them, that a setting compiles.
COMPILED_PARTS = ("prefill", "forwards")

# Prompts of various lengths, which share nothing.
PROMPT_TOKENS = (60, 90, 120, 150, 180, 210, 240, 270)
COMPLETION_TOKENS = 128
SEED = 0


def main() -> None:
    """Measure each setting, and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--repetitions", type=int, default=3, help="timed rollouts of each setting")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder()).eval()
    model = model.to(getattr(torch, options.dtype))
    print("setting: prefill tokens/s (ratio), decode tokens/s (ratio), seconds before the first")
    for line in lines(model, options.settings, options.repetitions):
        print(line, flush=True)


def lines(model: torch.nn.Module, names: Sequence[str], repetitions: int) -> Iterator[str]:
    """Yield a line for each setting: its speed beside that of the first one, or why it failed."""
    first: Speed | None = None
    for name in names:
        try:
            speed = measure(model, SETTINGS[name], repetitions)
        except Exception as error:  # noqa: BLE001  the reason is what is printed
            yield f"{name}: failed, {type(error).__name__}: {' '.join(str(error).split())}"
            continue
        first = first or speed
        prefill = f"{speed.prefill:.0f} ({speed.prefill / first.prefill:.2f})"
        decode = f"{speed.decode:.0f} ({speed.decode / first.decode:.2f})"
        yield "; ".join([f"{name}: {prefill}, {decode}, {speed.seconds:.1f}", *speed.obstacles])


class Speed(NamedTuple):
    """What one setting of compilation reaches."""

    prefill: float
    """Tokens per second."""
    decode: float
    """Tokens per second."""
    seconds: float
    """Until the first rollout that is timed."""
    obstacles: list[str]
    """The parts that run otherwise than asked, each with the reason."""


def measure(model: torch.nn.Module, settings: dict[str, Any], repetitions: int) -> Speed:
    """Return the median speed of so many rollouts.

    Raises:
        RolloutError: the engine refuses the setting, or fails with it.
    """
    prompts = [[100 + row, *range(200, 199 + size)] for row, size in enumerate(PROMPT_TOKENS)]
    start = time.perf_counter()
    with RolloutGenerator(model, RolloutConfig(seed=SEED, **settings)) as generator:
        # Longer than the steps after which a trace is made.
        rollout_seconds(generator, prompts, COMPLETION_TOKENS)
        rollout_seconds(generator, prompts, 1)
        seconds = time.perf_counter() - start
        prefills: list[float] = []
        decodes: list[float] = []
        for _ in range(repetitions):
            prefill = rollout_seconds(generator, prompts, 1)
            whole = rollout_seconds(generator, prompts, COMPLETION_TOKENS)
            prefills.append(sum(PROMPT_TOKENS) / prefill)
            decodes.append(len(prompts) * (COMPLETION_TOKENS - 1) / (whole - prefill))
        paths = [
            path
            for path in generator.manager.engine.paged_model.paths
            if path.part in COMPILED_PARTS
        ]
        obstacles = [str(path) for path in paths if path.obstacle]
    return Speed(statistics.median(prefills), statistics.median(decodes), seconds, obstacles)


def rollout_seconds(
    generator: RolloutGenerator, prompts: list[list[int]], num_tokens: int
) -> float:
    """Time completions of one length under a policy version of their own: nothing is cached."""
    generator.sync_weights()
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    start = time.perf_counter()
    generator.generate_batch(prompts, sampling_params=params)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
