"""One process of several that record one loop together. Run by `processes.run_processes`.

Each samples prompts of its own. Writes what it gave to `record`, and what was refused.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import wandb
from tiny import char_tokenizer, tiny_model
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from cb_rollout import (
    GenerationOutput,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)

NUM_STEPS = 2
PARAMS = SamplingParams(max_new_tokens=5)


def rolled_out(generator: RolloutGenerator, rank: int) -> list[GenerationOutput]:
    """Completions of this process's prompts, of which another one has more."""
    prompts = [[40 + rank, 41, 42], [50 + rank, 51], [60, 61]][: 2 + rank]
    outputs = generator.generate_batch(prompts, sampling_params=PARAMS, num_return_sequences=2)
    return list(outputs.values())


def off_by(outputs: list[GenerationOutput], rank: int) -> list[list[float]]:
    """Log-probabilities of a trainer that differs more on each rank."""
    return [[x - 0.25 * (rank + t) for t, x in enumerate(o.logprobs)] for o in outputs]


def refusal(generator: RolloutGenerator, *arguments: Any, **named: Any) -> str:
    """What `record` says, which must be an error."""
    try:
        generator.record(*arguments, **named)
    except InvalidRequestError as error:
        return str(error)
    raise AssertionError("it was recorded")


def record_split(folder: Path) -> int:
    """Record what a model over both processes samples, of which each has all outputs."""
    path = folder / "model"
    if dist.get_rank() == 0:
        tiny_model().save_pretrained(path)
    dist.barrier()
    config = DistributedConfig(tp_size=2)
    split = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).eval()
    with RolloutGenerator(split, RolloutConfig(seed=0, record_num_sequences=100)) as generator:
        outputs = rolled_out(generator, rank=0)
        generator.record(outputs, output_dir=folder / "split")
    config = RolloutConfig(seed=0, record_num_sequences=100, tensor_parallel_size=2)
    with RolloutGenerator(tiny_model(), config) as generator:
        own = rolled_out(generator, dist.get_rank())
        generator.record(own, output_dir=folder / "split_copy")
    return len(outputs)


def main() -> None:
    """Record two steps, then calls that are refused, then one of a few sequences."""
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        wandb.init(project="cb_rollout", dir=folder, mode="offline")
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    config = RolloutConfig(seed=0, record_num_sequences=100)
    given, refused = [], []
    with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        for step in range(1, NUM_STEPS + 1):
            outputs = rolled_out(generator, rank)
            rewards = [float(rank + number) for number in range(len(outputs))]
            trained = off_by(outputs, rank)
            generator.record(outputs, rewards, None, trained, output_dir=folder / "all")
            for output, reward, values in zip(outputs, rewards, trained, strict=True):
                tokens = output.generated_tokens
                given.append([step, tokens, output.logprobs, reward, values])
        # One process is wrong, and all are told.
        some = rewards[:1] if rank == 1 else rewards
        refused.append(refusal(generator, outputs, some))
        refused.append(refusal(generator, outputs, rewards, step=5 + rank))
        refused.append(refusal(generator, None if rank == 1 else outputs))
        wrong = {"output_dir": 3} if rank == 0 else {}
        refused.append(refusal(generator, outputs, rewards, **wrong))
        # Nothing of it has counted.
        generator.record(outputs, rewards)
    if rank == 0:
        wandb.finish()
        wandb.teardown()
    with RolloutGenerator(model, RolloutConfig(seed=0, record_num_sequences=5)) as generator:
        generator.record(rolled_out(generator, rank), output_dir=folder / "some")
    num_split = record_split(folder)
    said = {
        "pid": os.getpid(),
        "rank": rank,
        "world_size": dist.get_world_size(),
        "given": given,
        "refused": refused,
        "num_split": num_split,
    }
    result.write_text(json.dumps(said))
    dist.destroy_process_group()


main()
