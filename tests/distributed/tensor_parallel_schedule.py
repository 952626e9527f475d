"""One process of a tensor-parallel group under random schedules, and groups side by side.

The processes make the same calls. What differs between them is when a call meets the engine's
thread. Writes what was delivered. Run by `processes.run_processes`.
"""

import json
import random
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensor_parallel_rollouts import load_split
from tiny import largest_difference, tiny_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cb_rollout import (
    GenerationOutput,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)

CONFIG = RolloutConfig(seed=0, block_size=4, num_blocks=12, max_batch_tokens=24)
LENGTHS = (2, 20)
MAX_NEW_TOKENS = (1, 16)
OPERATIONS = ("add", "add", "add", "cancel", "sync", "pause", "take", "verify", "sleep")
WEIGHT_CHANGE = 0.99


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(WEIGHT_CHANGE)


def run_schedule(
    generator: RolloutGenerator, split: PreTrainedModel, draws: random.Random
) -> list[GenerationOutput]:
    """Some random calls, then all that is left."""
    manager = generator.manager
    live: list[str] = []
    delivered: list[GenerationOutput] = []
    manager.start()
    for _ in range(draws.randint(3, 10)):
        operation = draws.choice(OPERATIONS)
        if operation == "add":
            prompt = [draws.randrange(3, 256) for _ in range(draws.randint(*LENGTHS))]
            live += manager.add_requests(
                [prompt] * draws.randint(1, 3),
                sampling_params=SamplingParams(max_new_tokens=draws.randint(*MAX_NEW_TOKENS)),
            )
        elif operation == "cancel" and live:
            manager.cancel_request(draws.choice(live))
        elif operation == "sync":
            with manager.pause(draws.choice(["keep", "recompute"])):
                change(split)
        elif operation == "pause":
            with manager.pause():
                pass
        elif operation == "take" and live:
            taken = manager.get_result()
            live.remove(taken.request_id)
            delivered.append(taken)
        elif operation == "sleep":
            generator.sleep()
            generator.wake()
        elif operation == "verify":
            # Nothing can be compared before the first rollout, and after a sync.
            with suppress(InvalidRequestError):
                generator.verify(1)
    delivered += [manager.get_result() for _ in live]
    return delivered


def main(num_schedules: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    whole = tiny_model()
    found: dict[str, Any] = {"rank": dist.get_rank()}
    with tempfile.TemporaryDirectory() as name:
        names: list[str] = [name]
        dist.broadcast_object_list(names)
        split = load_split(whole, Path(names[0]) / "model", tp_size=2)
        with RolloutGenerator(split, CONFIG) as generator:
            drawing = SamplingParams(temperature=1.0, max_new_tokens=12)
            outputs = generator.generate_batch([[5, 6, 7]] * 2, sampling_params=drawing)
            found["drawn"] = [output.generated_tokens for output in outputs.values()]
            outputs = generator.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=9)
            found["difference"] = largest_difference(whole, outputs.values())
            found["delivered"] = []
            for number in range(int(num_schedules)):
                outputs = run_schedule(generator, split, random.Random(number))
                found["delivered"].append(
                    sorted((o.request_id, o.generated_tokens, o.policy_versions) for o in outputs)
                )
            found["preemptions"] = generator.manager.counters.preemptions
            found["blocks"] = generator.manager.status().kv_blocks_used
            whole.load_state_dict(
                {
                    name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                    for name, tensor in split.state_dict().items()
                }
            )
            generator.sync_weights()
            outputs = generator.generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=9)
            found["difference_after"] = largest_difference(whole, outputs.values())
        Path(path).write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
