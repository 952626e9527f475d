"""One process of several whose model is under FSDP2: what a sync of its copy gathers.

Writes the bytes of the shards that it sends, by the dtype of the copy, whether the copy holds what
the whole model rounds to, and in which order tensors are gathered and copied. Run by
`processes.run_processes`.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny_model
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from cb_rollout import RolloutConfig
from cb_rollout.weights import create_weight_sync, tensor


class Gathers(TorchDispatchMode):
    """Notes the bytes that each gather sends, and what happens in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []
        self.order = ""
        """Letters of events: g: a gather begins, w: one has ended, c: a value is copied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "all_gather_into_tensor":
            self.num_bytes.append(args[0].nbytes)
        letters = {"all_gather_into_tensor": "g", "wait_tensor": "w", "copy_": "c"}
        self.order += letters.get(name, "")
        return func(*args, **(kwargs or {}))


def synced(dtype: str) -> dict[str, Any]:
    """Sync a copy of this dtype once more."""
    whole, model = tiny_model(), tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    weights = create_weight_sync(model, RolloutConfig(weight_sync="copy", rollout_dtype=dtype))
    # Less than any tensor, so that each is gathered alone.
    tensor.BUCKET_BYTES = 1
    with Gathers() as gathers:
        weights.sync()
    held, own = weights.module.state_dict(), whole.state_dict()
    return {
        "num_bytes": sum(gathers.num_bytes),
        "num_held_bytes": sum(parameter.nbytes for parameter in weights.module.parameters()),
        "is_equal": all(torch.equal(held[name], own[name].to(held[name].dtype)) for name in own),
        "differing": weights.differing(),
        "order": gathers.order,
    }


def with_one_thread(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    """Gloo whose collectives may be in flight together, for one thread ends them in turn."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout, options._threads = timeout, 1
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


def main() -> None:
    """Both dtypes, over the backend that the arguments name."""
    dist.Backend.register_backend("one_thread", with_one_thread, devices=["cpu"])
    dist.init_process_group(None if sys.argv[1] == "its default" else sys.argv[1])
    results = {dtype: synced(dtype) for dtype in ("float32", "bfloat16")}
    Path(sys.argv[-1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
