"""One process of several that train one model with GRPO and numerics="bitwise", twice."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach, detach

FIGURES = (
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/max",
)


def trained(folder: Path, loss_forward: str) -> tuple[Any, list[torch.Tensor]]:
    """Train two steps, and return the trainer and its weights."""
    trainer = tiny_trainer(folder, max_steps=2, per_device_train_batch_size=8)
    config = RolloutConfig(numerics="bitwise", old_logps="trainer", loss_forward=loss_forward)
    attach(trainer, config)
    trainer.train()
    detach(trainer)
    return trainer, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def main() -> None:
    """Write the figures of every way, and whether a second run ended in the same weights."""
    found = {}
    for loss_forward in ("trainer", "packed"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / os.environ["RANK"]
            trainer, weights = trained(folder, loss_forward)
            _, again = trained(folder, loss_forward)
        found[loss_forward] = {
            "figures": [logged(trainer, name) for name in FIGURES],
            "is_repeated": all(map(torch.equal, weights, again)),
            "num_weights": len(weights),
        }
    Path(sys.argv[-1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
