"""What the server that processes are forked from imports, once for all of them."""

import gc

# Trainers, optimizers and adapters are imported lazily by the packages that own them.
import accelerate.state  # noqa: F401
import parity  # noqa: F401
import peft  # noqa: F401
import playback  # noqa: F401
import tiny_trainer  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import cb_rollout.integrations.trl.attachment  # noqa: F401

# A collection in a process would copy the pages of every module.
gc.collect()
gc.freeze()
