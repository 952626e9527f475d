"""One process of several that train stock GRPOTrainers under FSDP2, FSDP1 or DeepSpeed.

Run by `processes.run_processes`, with the names of the ways to try. A way and a case of
`packed_training`, as in "fsdp2/uneven", train with loss_forward="packed".
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import trl.trainer.grpo_trainer as grpo
from accelerated import allow_deepspeed, allow_fsdp
from datasets import Dataset
from packed_training import CASES, train_twice
from peft import LoraConfig
from playback import (
    TOOL_TEMPLATE,
    TOOLS,
    Watched,
    double,
    parse_any_letter_as_a_call,
    play_back,
    watched,
)
from tiny import plain_logprobs
from tiny_trainer import tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.compat.fsdp import local_part

PROMPT, COMPLETION = [5, 6], [7, 8, 9]
ADAPTERS = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}


def fsdp(version: int, **more: Any) -> dict[str, Any]:
    """Trainer settings: a unit a layer."""
    layers = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
    # Every process has made the same model; loading on one alone needs an accelerator.
    loading = {"cpu_ram_efficient_loading": False, "sync_module_states": False}
    return {"fsdp": True, "fsdp_config": {"version": version, **layers, **loading, **more}}


def zero(stage: int) -> dict[str, Any]:
    """Trainer settings: every parameter partitioned, with torch's own optimizer."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
    }
    return {"deepspeed": config, "use_cpu": False, "max_grad_norm": 1.0}


def call_on_even_processes(*arguments: Any, **named: Any) -> dict[str, Any]:
    """TRL's `parse_response`: the other processes have no turn but the first."""
    message = parse_any_letter_as_a_call(*arguments, **named)
    if int(os.environ["RANK"]) % 2:
        message.pop("tool_calls", None)
    return message


def with_tools_on_some(tokenizer: Any) -> None:
    """Prepare the tokenizer, and TRL, for calls that a random model writes."""
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = "parsed by the test"
    grpo.parse_response = call_on_even_processes


CHATS = {
    "trainer_arguments": {
        "tools": [double],
        "train_dataset": Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"{n} is what?"}]} for n in range(32)]
        ),
    },
    "reward": lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
}

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_lora": {"trainer_arguments": ADAPTERS},
    "fsdp2": fsdp(2),
    "fsdp2_lora": {**fsdp(2), "trainer_arguments": ADAPTERS},
    "fsdp2_tensor_parallel": {**fsdp(2), "tensor_parallel_size": 2},
    "fsdp2_tensor_parallel_tools": {
        **(fsdp(2) | TOOLS | CHATS),
        "tensor_parallel_size": 2,
        "prepare_tokenizer": with_tools_on_some,
    },
    "fsdp2_checkpointed": fsdp(2, activation_checkpointing=True),
    "fsdp2_bf16": {**fsdp(2), "bf16": True},
    "fsdp1": fsdp(1),
    "fsdp1_lora": {**fsdp(1), "trainer_arguments": ADAPTERS},
    "fsdp1_bf16": {**fsdp(1), "bf16": True},
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3_lora": {**zero(3), "trainer_arguments": ADAPTERS},
}


def train(
    output_dir: Path, settings: dict[str, Any], record: Watched | None = None
) -> dict[str, Any]:
    """Train one trainer for three steps, and return what it logged."""
    settings = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, **settings}
    tensor_parallel_size = settings.pop("tensor_parallel_size", 1)
    trainer = tiny_trainer(output_dir, **settings)
    assert trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    watched(trainer, record)
    config = RolloutConfig(
        old_logps="trainer",
        verify_every_steps=1,
        verify_weight_sync=True,
        num_blocks=64,
        tensor_parallel_size=tensor_parallel_size,
    )
    generator = attach(trainer, config)
    engine = generator.manager.engine
    before = plain_logprobs(engine.model, PROMPT, COMPLETION)
    trainer.train()
    generator.sync_weights()
    after = plain_logprobs(engine.model, PROMPT, COMPLETION)
    steps = [row for row in trainer.state.log_history if "reward" in row]
    num_rows_held = len(local_part(engine.model.lm_head.weight))
    generator.close()
    return {
        "is_shared": not engine.training_model.is_copied,
        "trained": type(engine.training_model.module).__name__,
        "moved": max(abs(a - b) for a, b in zip(before, after, strict=True)),
        "dtypes": sorted({str(p.dtype) for p in engine.model.parameters()}),
        "policy_version": generator.policy_version,
        "num_rows_held": num_rows_held,
        "drifts": [row["rollout/logprob_drift_max"] for row in steps],
        "differences": [row["sampling/sampling_logp_difference/mean"] for row in steps],
    }


def train_as_played_back(output_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train as `train` does, and a trainer that is not attached on the same tokens."""
    record = Watched()
    found = train(output_dir, settings, record)
    settings = {**settings, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    settings.pop("tensor_parallel_size")
    alone = tiny_trainer(output_dir, **settings)
    played = play_back(alone, record.turns)
    alone.train()
    return found | {
        "losses": record.losses,
        "losses_played_back": played.losses,
        "num_turns": len(record.turns),
    }


STUCK_SECONDS = 280
# Past this a process ends itself and says where it waited.


def main() -> None:
    """Every way that was named, one after the other."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    *ways, path = sys.argv[1:]
    allow = allow_deepspeed if "zero" in ways[0] else allow_fsdp
    allow()
    output_dir = Path(path).with_suffix(".out")
    results = {}
    for way in ways:
        settings, case = WAYS[way.split("/")[0]], CASES.get(way.partition("/")[2])
        if case:
            results[way] = train_twice(output_dir, settings, case)
        elif "tensor_parallel_size" in settings:
            results[way] = train_as_played_back(output_dir, settings)
        else:
            results[way] = train(output_dir, settings)
    Path(path).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
