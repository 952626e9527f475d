"""One process of several that train one model under DeepSpeed and roll it out after every step.

As `sharded_rollouts`, with deepspeed's engine; on the CPU, over gloo, with torch's optimizer.
"""

import faulthandler
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from sharded_rollouts import BATCH, follow, plain, sgd, with_lora

from cb_rollout import RolloutConfig

STUCK_SECONDS = 280
# Past this a process ends itself and says where it waited.


def engine(model: Any, stage: int) -> Any:
    """The model in deepspeed's engine; at stage 3 no parameter stays whole."""
    config = {
        "train_micro_batch_size_per_gpu": len(BATCH),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(model=model, optimizer=sgd(model), config=config)[0]


def stepping(model: Any) -> Callable[[], None]:
    """What takes one step on the batch, the same on every process."""

    def step() -> None:
        model.train()
        model.backward(model(input_ids=BATCH, labels=BATCH).loss)
        model.step()

    return step


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor whole, all at once."""
    with deepspeed.zero.GatheredParameters(list(model.module.parameters()), modifier_rank=None):
        return {name: t.detach().clone() for name, t in model.module.state_dict().items()}


def main() -> None:
    """Every way that was named, one after the other."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    deepspeed.init_distributed(dist_backend="gloo")
    config = RolloutConfig(seed=dist.get_rank(), verify_weight_sync=True)
    tied = {"tie_word_embeddings": True}
    *ways, path = sys.argv[1:]
    # Stage, model, its settings, and the level of the sleep before each step.
    every_way: dict[str, tuple[int, Callable[..., Any], dict[str, Any], int]] = {
        "zero1": (1, plain, {}, 0),
        "zero2": (2, plain, {}, 0),
        "zero3": (3, plain, {}, 0),
        "zero3_tied": (3, plain, tied, 0),
        "zero3_lora": (3, with_lora, {}, 0),
        "zero3_slept": (3, plain, {}, 2),
    }
    results: dict[str, Any] = {}
    for way in ways:
        stage, make, settings, level = every_way[way]
        model = engine(make(**settings), stage)
        results[way] = follow(model, make(**settings), config, stepping, gathered, level)
    Path(path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
