"""One process of several that train stock GRPOTrainers under accelerate's FSDP2.

accelerate 1.15 takes an FSDP plugin on accelerators only, and leaves it out on the CPU. Here its
state is told to take it; all that follows, from `prepare` to the optimizer step, is accelerate's
and TRL's own. Run by `processes.run_processes`.
"""

import faulthandler
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from tiny_trainer import tiny_trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cb_rollout import RolloutConfig, attach

make_state = AcceleratorState.__init__


@functools.wraps(make_state)
def make_state_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    """What accelerate does with the plugin on a GPU."""
    make_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
        self.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def train(output_dir: Path, arguments: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Train one trainer for three steps, and return what it logged."""
    trainer = tiny_trainer(
        output_dir,
        trainer_arguments=arguments,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        fsdp=True,
        fsdp_config={"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        **settings,
    )
    assert trainer.is_fsdp_enabled
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    generator = attach(trainer, RolloutConfig(verify_every_steps=1, verify_weight_sync=True))
    trainer.train()
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    after = [p.full_tensor() if isinstance(p, DTensor) else p for p in after]
    generator.sync_weights()
    generated = generator.manager.engine.model
    steps = [row for row in trainer.state.log_history if "reward" in row]
    generator.close()
    return {
        "num_sharded": sum(isinstance(m, FSDPModule) for m in trainer.model.modules()),
        "moved": max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)),
        "dtypes": sorted({str(p.dtype) for p in generated.parameters()}),
        "policy_version": generator.policy_version,
        "drifts": [row["rollout/logprob_drift_max"] for row in steps],
        "differences": [row["sampling/sampling_logp_difference/mean"] for row in steps],
    }


STUCK_SECONDS = 60
# Past this a process ends itself and says where it waited.


def main() -> None:
    """Whole, with adapters, and in mixed precision."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    AcceleratorState.__init__ = make_state_with_fsdp
    output_dir = Path(sys.argv[-1]).with_suffix(".out")
    adapters = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
    results = {
        "whole": train(output_dir, {}),
        "lora": train(output_dir, adapters),
        "bf16": train(output_dir, {}, bf16=True),
    }
    Path(sys.argv[-1]).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
