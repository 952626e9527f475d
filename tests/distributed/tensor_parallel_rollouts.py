"""One process of a tensor-parallel group that rolls out models of many types.

Writes, for each type, whether its tokens are those of the same model in one piece, and how far its
log-probabilities are from a plain forward of that. Run by `processes.run_processes`.
"""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import create_model, plain_logprobs, prompts
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

NEW_TOKENS = 12
SAMPLED = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=5)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, do_sample=False)
WEIGHT_CHANGE = 0.9
# Four processes can share them.
HEADS = {"num_key_value_heads": 4}


def load_split(model: PreTrainedModel, folder: Path, **sizes: int) -> PreTrainedModel:
    """The model, split over all processes."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(**(sizes or {"tp_size": dist.get_world_size()}))
    split = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()
    split.generation_config = model.generation_config
    return split


def roll_out(generator: RolloutGenerator) -> list[dict[str, Any]]:
    """Several lengths, greedy and sampled, which together need more blocks than there are."""
    inputs = prompts(3, 17, 30, 9, 17)
    params = [GREEDY, SAMPLED, SAMPLED, GREEDY, SAMPLED]
    outputs = generator.generate_batch(inputs, sampling_params=params)
    return [
        {"prompt": o.prompt_ids, "tokens": o.generated_tokens, "logprobs": o.logprobs}
        for o in outputs.values()
    ]


def largest_difference(model: PreTrainedModel, rows: list[dict[str, Any]]) -> float:
    """Between delivered log-probabilities and a plain forward's, in nats."""
    found = 0.0
    for row in rows:
        expected = plain_logprobs(model, row["prompt"] + row["tokens"])[-1 - NEW_TOKENS : -1]
        chosen = expected.gather(-1, torch.tensor(row["tokens"])[:, None])[:, 0]
        found = max(found, (chosen - torch.tensor(row["logprobs"])).abs().max().item())
    return found


def check(model_type: str, folder: Path) -> dict[str, Any]:
    """Roll out twice, with a weight change in between."""
    whole = create_model(model_type, **HEADS)
    split = load_split(whole, folder)
    config = RolloutConfig(seed=0, block_size=4, num_blocks=24, max_batch_tokens=24)
    found: dict[str, Any] = {"differences": [], "is_equal": []}
    with RolloutGenerator(whole, config) as alone, RolloutGenerator(split, config) as together:
        for _ in range(2):
            expected, rows = roll_out(alone), roll_out(together)
            found["is_equal"].append([r["tokens"] for r in rows] == [r["tokens"] for r in expected])
            found["differences"].append(largest_difference(whole, rows))
            for model in (whole, split):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(WEIGHT_CHANGE)
            alone.sync_weights()
            together.sync_weights()
        found["tokens"] = [row["tokens"] for row in rows]
        found["preemptions"] = together.manager.counters.preemptions
        keys = [
            spec.keys
            for spec in together.manager.engine.paged_model.layout.layers
            if spec.keys is not None
        ]
        found["key_heads"] = keys[-1].shape[0]
    return found


def main(*model_types: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        names: list[str] = [name]
        dist.broadcast_object_list(names)
        for model_type in model_types:
            found[model_type] = check(model_type, Path(names[0]) / model_type)
        Path(path).write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:-1], path=sys.argv[-1])
