"""accelerate's FSDP and DeepSpeed on the CPU, which accelerate 1.15 keeps for accelerators.

Its state is told to take the plugin it is given; all that follows, from `prepare` to the optimizer
step, is accelerate's and the trainer's own.
"""

import functools
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

make_state, prepare_backend = AcceleratorState.__init__, PartialState._prepare_backend


def allow_fsdp() -> None:
    """Have trainers with `fsdp=True` train under FSDP."""

    @functools.wraps(make_state)
    def made(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        make_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            # FSDP1 takes no index of the CPU, which accelerate gives.
            self.device = PartialState._shared_state["device"] = torch.device("cpu")

    AcceleratorState.__init__ = made


def allow_deepspeed() -> None:
    """Have trainers with `deepspeed={...}` and `use_cpu=False` train under DeepSpeed on gloo."""

    def prepared(self: Any, *_: Any, **__: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.NO

    PartialState._prepare_backend = prepared
