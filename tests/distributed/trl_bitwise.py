"""One process of several that train one model with GRPO and numerics="bitwise", twice.

Run by `processes.run_processes`, with names of `trl_sharded.WAYS`.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerated import allow_fsdp
from tiny_trainer import logged, tiny_trainer
from torch.distributed.tensor import DTensor
from trl_sharded import WAYS

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach

FIGURES = (
    "sampling/sampling_logp_difference/max",
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/max",
    "rollout/logprob_drift_max",
)


def trained(folder: Path, loss_forward: str, way: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Train two steps; return what was seen, and this process's weights."""
    torch.manual_seed(0)
    settings = {"max_steps": 2, "per_device_train_batch_size": 8, **WAYS[way]}
    trainer = tiny_trainer(folder, **settings)
    config = RolloutConfig(
        numerics="bitwise", old_logps="trainer", loss_forward=loss_forward, verify_every_steps=1
    )
    refusal = ""
    if way == "fsdp2_bf16":
        try:
            attach(trainer, config)
        except ConfigurationError as error:
            refusal = str(error)
        plugin = trainer.accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, output_dtype=torch.float32
        )
    engine = attach(trainer, config).manager.engine
    trainer.train()
    is_shared = not engine.training_model.is_copied
    detach(trainer)
    figures = [logged(trainer, name) for name in FIGURES]
    seen = {"figures": figures, "is_shared": is_shared, "refusal": refusal}
    return seen, [local(parameter) for parameter in trainer.model.parameters()]


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part, copied."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part.detach().clone()


def main() -> None:
    """Write what was seen of each way and loss, and whether a second run ended in its weights."""
    *ways, path = sys.argv[1:]
    found: dict[str, Any] = {}
    for way in ways:
        if way.startswith("fsdp"):
            allow_fsdp()
        for loss_forward in ("trainer", "packed"):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name) / os.environ["RANK"]
                seen, weights = trained(folder, loss_forward, way)
                _, again = trained(folder, loss_forward, way)
            is_repeated = all(map(torch.equal, weights, again))
            found[f"{way}/{loss_forward}"] = {
                **seen,
                "is_repeated": is_repeated,
                "num_weights": sum(weight.numel() for weight in weights),
            }
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
