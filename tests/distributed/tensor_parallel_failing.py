"""One process of a tensor-parallel group, in which something goes wrong.

Run by `processes.run_processes`, with the way in which it does.
"""

import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensor_parallel_rollouts import load_split
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

# Far below the half hour that a collective waits for a lost process.
LATE_SECONDS = 30
STEPS_BEFORE_FAILURE = 5
SHORT_SECONDS = 6


def main(way: str, _: str) -> None:
    torch.set_num_threads(1)
    is_late = way.startswith("late")
    is_absent = way.startswith("absent") or is_late
    is_short = is_absent and not is_late
    timeout = timedelta(seconds=SHORT_SECONDS) if is_short else timedelta(minutes=30)
    dist.init_process_group("gloo", timeout=timeout)
    names: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    split = load_split(tiny_model(), Path(names[0]) / "model", tp_size=2)
    wait = SHORT_SECONDS if is_late else None
    config = RolloutConfig(seed=0, num_blocks=64, cpu_group_timeout=wait)
    generator = RolloutGenerator(split, config)
    started = time.monotonic()
    failing = 0 if way.endswith("_leader") else 1
    num_forwards = 0

    def fail(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards > STEPS_BEFORE_FAILURE:
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such expert")

    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    if dist.get_rank() == failing:
        if is_absent:
            time.sleep(2 * SHORT_SECONDS)
        elif way == "other_call":
            prompts[0] = [5, 6, 8]
        else:
            # The second layer's, so that the others wait in a collective of this forward.
            split.model.layers[1].register_forward_pre_hook(fail)
    try:
        generator.generate_batch(prompts, sampling_params=SamplingParams(max_new_tokens=60))
    finally:
        if time.monotonic() - started > LATE_SECONDS:
            sys.stderr.write("ended late\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
