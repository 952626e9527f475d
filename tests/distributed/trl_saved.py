"""One process of several that train stock trainers and save their rollouts.

Run by `processes.run_processes`, with names of `WAYS` and a folder that the processes share.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from accelerate import PartialState
from tiny_trainer import tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.metrics.run_records import iterate_rollouts, read_metrics
from cb_rollout.strategies import DynamicSampling

FEW = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4}
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {},
    # Half of each group is on the other process.
    "divided": {"per_device_train_batch_size": 2},
    "rloo": {"trainer_class": RLOOTrainer, "config_class": RLOOConfig},
    "dynamic": {},
    "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8},
}


def sum_of_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that a row's own tokens tell."""
    return [float(sum(ids)) for ids in completion_ids]


def trained(folder: Path, way: str) -> dict[str, Any]:
    """Train two steps, and return what this process saved and recorded."""
    saved = folder / way / "rollouts"
    trainer = tiny_trainer(folder / way, reward=sum_of_ids, **(FEW | WAYS[way]))
    attach(trainer, RolloutConfig(save_rollouts=str(saved), record_num_sequences=100))
    if way == "dynamic":
        use_strategy(trainer, DynamicSampling(max_dropped_groups=4))
    trainer.train()
    detach(trainer)
    rank = trainer.accelerator.process_index
    paths = sorted(saved.glob(f"*-{rank:05}.parquet"))
    rows = [row for path in paths for row in parquet.read_table(path).to_pylist()]
    found: dict[str, Any] = {
        "saved": [[row["mode"], sum(row["generated_tokens"]), row["reward"]] for row in rows]
    }
    if trainer.accelerator.is_main_process:
        recorded = [[sum(row.token_ids), row.reward] for row in iterate_rollouts(folder / way)]
        found["recorded"] = recorded
        metrics = [x for x in read_metrics(folder / way) if x.group_rewards]
        found["groups"] = [x.group_rewards for x in metrics]
        found["means"] = [x.scalars["reward"] for x in metrics]
    return found


def main() -> None:
    """Write what was found of each way."""
    *ways, folder, path = sys.argv[1:]
    found: dict[str, Any] = {way: trained(Path(folder), way) for way in ways}
    found["num_processes"] = PartialState().num_processes
    Path(path).write_text(json.dumps(found))
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
