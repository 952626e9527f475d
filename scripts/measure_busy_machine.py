"""Print the speed of a rollout on a CPU beside a busy process, by settings of OpenMP.

SmolLM2-135M-Instruct samples 16 completions in a process of its own, for each setting alone and
beside a process that computes without end. Nothing else may run.

python scripts/measure_busy_machine.py --tokens 96
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from smollm2 import smollm2_folder

SETTINGS = {
    "defaults": {},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


def main() -> None:
    """Run this script once for each setting, or one measurement in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96, help="of each completion")
    parser.add_argument("--here", action="store_true", help="measure once, in this process")
    options = parser.parse_args()
    if options.here:
        print(f"{measure(options.tokens):.1f}")
        return
    print("setting: tokens/s alone, tokens/s beside a busy process")
    for name, variables in SETTINGS.items():
        figures = []
        for num_busy in (0, 1):
            with busy_processes(num_busy):
                command = [sys.executable, __file__, "--here", "--tokens", str(options.tokens)]
                environment = os.environ | variables
                ran = subprocess.run(
                    command, env=environment, check=True, capture_output=True, text=True
                )
                figures.append(ran.stdout.split()[-1])
        print(f"{name}: {', '.join(figures)}", flush=True)


def measure(num_tokens: int) -> float:
    """Return tokens per second of 16 completions of this length, after a warm-up."""
    folder = smollm2_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator:
        prompts = [[1, *range(100, 120)]] * 16
        for _ in range(2):
            started = time.perf_counter()
            outputs = generator.generate_batch(prompts, sampling_params=params)
            seconds = time.perf_counter() - started
    return sum(len(output.generated_tokens) for output in outputs.values()) / seconds


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep as many cores busy as there are processes."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
