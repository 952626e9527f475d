"""One process of several that train stock GRPOTrainers with strategies.

Run by `processes.run_processes`, with the names of the ways to try.
"""

import faulthandler
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerated import allow_fsdp
from tiny_trainer import logged, tiny_trainer
from trl_sharded import STUCK_SECONDS, fsdp

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.integrations.trl.rows.loss_rows import ROWS_KEY
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.rollout.distributed import deal
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts

# Lengths from 1 to 30 tokens.
UNEVEN = {"generation_kwargs": {"eos_token_id": list(range(1, 9))}, "max_completion_length": 30}


@dataclass(frozen=True, kw_only=True)
class Dapo(DynamicSampling, PartialRollouts):
    name = "dapo"


WAYS = {
    "dynamic": (DynamicSampling(max_dropped_groups=24), {}),
    "dynamic_split": (DynamicSampling(max_dropped_groups=24), {"tensor_parallel_size": 2}),
    "over": (OverSampling(num_extra_groups=2), {}),
    "partial": (PartialRollouts(num_extra_groups=2, max_staleness=3), {}),
    "fsdp2": (Dapo(num_extra_groups=2, max_dropped_groups=24), fsdp(2)),
}


def often_equal(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """No advantage where the first summand is below 4."""
    return [
        float(len(completion)) if int(prompt[0]) > 3 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def kept_batches(trainer: Any) -> list[dict[str, Any]]:
    """The trainer's batches, as its loss gets them."""
    batches, inner = [], trainer._generate_and_score_completions

    def generate_and_score(inputs: list[Any]) -> dict[str, Any]:
        batches.append(inner(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = generate_and_score
    return batches


def described(batch: dict[str, Any]) -> dict[str, Any]:
    """What a test compares between the processes."""
    mask = batch["completion_mask"].bool()
    differences = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[mask].abs()
    return {
        "rows": [
            row[kept].tolist() for row, kept in zip(batch["completion_ids"], mask, strict=True)
        ],
        "records": [row.completion_ids for row in batch[ROWS_KEY]],
        "advantages": batch["advantages"].tolist(),
        "num_tokens": int(mask.sum()),
        "num_items": int(batch["num_items_in_batch"]),
        "difference": float(differences.max()),
    }


def train(output_dir: Path, way: str) -> dict[str, Any]:
    """Train one trainer for three steps, and return its batches."""
    strategy, settings = WAYS[way]
    size = settings.get("tensor_parallel_size", 1)
    settings = {name: value for name, value in settings.items() if name != "tensor_parallel_size"}
    few = {"per_device_train_batch_size": 12, "num_generations": 4}
    correction = {"vllm_importance_sampling_mode": "token_truncate"}
    trainer = tiny_trainer(
        output_dir, reward=often_equal, **UNEVEN, **few, **correction, **settings
    )
    checked = {"verify_every_steps": 1, "max_logprob_drift": 1e-4, "old_logps": "trainer"}
    attach(trainer, RolloutConfig(**checked, tensor_parallel_size=size))
    said = refusal_of_more(trainer, OverSampling(num_extra_groups=1))
    use_strategy(trainer, strategy)
    batches = kept_batches(trainer)
    trainer.train()
    dropped = logged(trainer, "rollout/groups_dropped")
    drifts = logged(trainer, "rollout/logprob_drift_max")
    detach(trainer)
    weights = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()
    ]
    return {
        "batches": [described(batch) for batch in batches],
        "dropped": dropped,
        "drifts": drifts,
        "refusal": said,
        "weight_sum": float(sum(weight.double().sum() for weight in weights)),
    }


def refusal_of_more(trainer: Any, strategy: OverSampling) -> str:
    """What is said against a strategy that samples ahead."""
    try:
        use_strategy(trainer, strategy)
    except ConfigurationError as error:
        return str(error)
    return ""


def refusal(output_dir: Path) -> str:
    """What is said where a group of four is divided over two processes."""
    trainer = tiny_trainer(output_dir, per_device_train_batch_size=2, num_generations=4)
    attach(trainer)
    try:
        use_strategy(trainer, DynamicSampling())
    except ConfigurationError as error:
        return str(error)
    finally:
        detach(trainer)
    return ""


def main() -> None:
    """Deal groups, then every way that was named, one after the other."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    *ways, path = sys.argv[1:]
    allow_fsdp()
    output_dir = Path(path).with_suffix(".out")
    results: dict[str, Any] = {way: train(output_dir, way) for way in ways}
    results["refusal"] = refusal(output_dir)
    state = PartialState()
    rank = state.process_index
    held = [
        [{"ids": torch.tensor([rank, n])} for n in range(num)]
        for num in ([5, 1, 5], [5, 2, 1])[rank]
    ]
    results["dealt"] = []
    for groups in held:
        kept, num_lacking = deal(state, groups, 3)
        results["dealt"].append([[group["ids"].tolist() for group in kept], num_lacking])
    Path(path).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
