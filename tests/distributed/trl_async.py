"""One process of several that train a stock AsyncGRPOTrainer, whose first one samples.

Writes what it was trained on and ended with. Run by `processes.run_processes`, with a checkpoint
and the way of distributing.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerated import allow_fsdp
from datasets import Dataset
from tiny import char_tokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_sharded import STUCK_SECONDS, fsdp

from cb_rollout import RolloutConfig
from cb_rollout.integrations.async_grpo import AsyncRollouts

ROWS = [{"prompt": f"{i}+{j}="} for i in range(4) for j in range(4)]
NUM_STEPS = 3


class Kept(AsyncRollouts):
    """Keeps each sample as the trainer takes it."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.taken: list[Any] = []

    def _report_age(self, sample: Any) -> None:
        super()._report_age(sample)
        self.taken.append(sample)


def share_of_sevens(completions: list[str], **_: Any) -> list[float]:
    return [completion.count("7") / max(1, len(completion)) for completion in completions]


def main(checkpoint: str, way: str, path: str) -> None:
    """Train for some steps."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    torch.set_num_threads(1)
    if way == "fsdp2":
        allow_fsdp()
    args = AsyncGRPOConfig(
        output_dir=str(Path(path).with_suffix(".out")),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        token_budget=0,
        max_staleness=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        **(fsdp(2) if way == "fsdp2" else {}),
    )
    rollouts = Kept(
        checkpoint, args, Dataset.from_list(ROWS), share_of_sevens, config=RolloutConfig()
    )
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=char_tokenizer(),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    rows: list[list[int]] = []
    inner = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        rows.extend(inputs["input_ids"].tolist())
        return inner(model, inputs, *rest, **named)

    trainer.compute_loss = compute_loss
    trainer.train()
    rollouts.stop()
    weights = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.model.parameters()
    ]
    found = {
        "rows": rows,
        "taken": [sample.input_ids.tolist() for sample in rollouts.taken],
        "has_engine": rollouts.generator is not None,
        "weights": [float(weight.double().abs().sum()) for weight in weights],
        "ratios": [log["ratio"] for log in trainer.state.log_history if "ratio" in log],
        "steps": trainer.state.global_step,
    }
    Path(path).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
