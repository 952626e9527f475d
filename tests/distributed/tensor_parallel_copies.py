"""One process of several that train one model whole or in shards, and roll out split copies of it.

Writes, for each way of training, how far the rollouts are from the same model in one piece. Run by
`processes.run_processes`.
"""

import faulthandler
import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import create_model, prompts
from peft import LoraConfig, get_peft_model
from tensor_parallel_rollouts import HEADS, largest_difference, load_split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat.fsdp import local_part

FIRST = "llama"
STUCK_SECONDS = 280
NEW_TOKENS = 12
PARAMS = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
SEEDED = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, seed=5)
WEIGHT_CHANGE = 0.9


def sharded(model: Any, **settings: Any) -> Any:
    """`model` under FSDP2, a layer a unit."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in base.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def by_columns(parameter: torch.nn.Parameter) -> Shard:
    """FSDP2's choice of the dimension to shard."""
    return Shard(parameter.ndim - 1)


def with_lora(model: Any) -> Any:
    """The model with adapters that change it."""
    torch.manual_seed(0)
    modules = ["q_proj", "o_proj", "embed_tokens"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=modules, init_lora_weights=False))


def change(model: Any, parameters: list[torch.nn.Parameter]) -> None:
    """Change the weights, and leave them sharded, as an optimizer and a backward pass do."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(WEIGHT_CHANGE)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def check(
    trained: Any, whole: Any, size: int, is_split: bool = False, **settings: Any
) -> dict[str, Any]:
    """Roll out twice, with a weight change in between."""
    config = RolloutConfig(
        num_blocks=64, tensor_parallel_size=size, verify_weight_sync=True, **settings
    )
    rank = dist.get_rank()
    found: dict[str, Any] = {"is_equal": [], "differences": [], "drifts": [], "asleep": set()}
    trainable = [(model, list(model.parameters())) for model in (whole, trained)]
    # Processes that train a split model have equal prompts, others their own.
    own = prompts(3, 17, 9) if is_split else prompts(3 + rank, 17, 9)[: 1 + rank % 3]
    with (
        RolloutGenerator(trained, config) as generator,
        RolloutGenerator(whole, RolloutConfig(num_blocks=64)) as alone,
    ):
        for _ in range(2):
            rows = roll_out(generator, own)
            found["is_equal"].append(
                [row["tokens"] for row in rows] == [row["tokens"] for row in roll_out(alone, own)]
            )
            found["differences"].append(largest_difference(whole, rows))
            found["drifts"].append(generator.verify(2).max)
            generator.sleep(level=2)
            held = map(local_part, generator.manager.model.parameters())
            found["asleep"] |= {tensor.untyped_storage().nbytes() for tensor in held}
            for model, parameters in trainable:
                change(model, parameters)
            alone.sync_weights()
            generator.sync_weights()
        (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS).values()
        found["drawn"] = output.generated_tokens
        found["refusal"] = "" if is_split else refusal(generator)
        head = generator.manager.model.get_output_embeddings().weight
        found["asleep"] = sorted(found["asleep"])
        found["held"] = head.to_local().numel() if isinstance(head, DTensor) else head.numel()
    return found


def roll_out(generator: RolloutGenerator, inputs: list[list[int]]) -> list[dict[str, Any]]:
    """Sequences whose draws are those of every process."""
    outputs = generator.generate_batch(inputs, sampling_params=SEEDED).values()
    return [
        {"prompt": o.prompt_ids, "tokens": o.generated_tokens, "logprobs": o.logprobs}
        for o in outputs
    ]


def refusal(generator: RolloutGenerator) -> str:
    """What a process is told of a prompt that the last one gives."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        generator.generate_batch(["text" if is_last else [5, 6]], sampling_params=PARAMS)
    except InvalidRequestError as error:
        return str(error)
    return ""


def main(*ways: str, path: str) -> None:
    """Every way that was named: of the first model type, or another type's name for FSDP2."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    names: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)

    def plain(model_type: str = FIRST) -> Any:
        return create_model(model_type, **HEADS)

    def tied() -> Any:
        return create_model(FIRST, tie_word_embeddings=True, **HEADS)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def split(number: int, **sizes: int) -> Any:
        return load_split(plain(), Path(names[0]) / str(number), **sizes)

    every_way: dict[str, Any] = {
        "fsdp2 x tp2": lambda: check(split(2, fsdp_size=2, tp_size=2), plain(), 1, is_split=True),
        "tp4": lambda: check(split(4, tp_size=4), plain(), 1, is_split=True, weight_sync="copy"),
        "ddp": lambda: check(DistributedDataParallel(plain()), plain(), 2),
        "fsdp2": lambda: check(sharded(plain()), plain(), 2),
        "fsdp2_lora": lambda: check(sharded(with_lora(plain())), with_lora(plain()), 2),
        "fsdp2_of_four": lambda: check(sharded(plain()), plain(), 4),
        "fsdp2_by_columns": lambda: check(
            sharded(plain(), shard_placement_fn=by_columns), plain(), 2
        ),
        "fsdp2_tied": lambda: check(sharded(tied()), tied(), 2),
        "hsdp": lambda: check(sharded(plain(), mesh=mesh), plain(), 2),
    }
    found: dict[str, Any] = {}
    for way in ways:
        if way in every_way:
            found[way] = every_way[way]()
        else:
            found[way] = check(sharded(plain(way)), plain(way), 2)
    Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:-1], path=sys.argv[-1])
