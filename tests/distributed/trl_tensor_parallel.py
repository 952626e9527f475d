"""One process of two that train a stock GRPOTrainer on a tensor-parallel model.

Writes what it sampled and logged. Run by `processes.run_processes`.
"""

import json
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from playback import watched
from tensor_parallel_rollouts import load_split
from tiny import char_tokenizer, tiny_model
from tiny_trainer import TENSOR_PARALLEL, logged, tiny_trainer

from cb_rollout import RolloutConfig, attach


def allow_tensor_parallel() -> None:
    """Have accelerate 1.15 take parallel models on the CPU, which it keeps for accelerators."""
    Accelerator.multi_device = property(lambda self: self.use_distributed)


def main(path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    allow_tensor_parallel()
    names: list[str] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    whole = tiny_model(vocab_size=len(char_tokenizer()))
    split = load_split(whole, folder / "model", tp_size=2)
    trainer = tiny_trainer(folder / f"{dist.get_rank()}", model=split, **TENSOR_PARALLEL)
    record = watched(trainer)
    generator = attach(trainer, RolloutConfig(verify_every_steps=1, num_blocks=64))
    trainer.train()
    generator.close()
    found = {
        "turns": record.turns,
        "losses": record.losses,
        "drifts": logged(trainer, "rollout/logprob_drift_max"),
    }
    Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
