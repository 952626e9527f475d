"""Define how the module that generates follows the trainer's weights, and the simplest way."""

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.fsdp import local_part
from cb_rollout.config.combinations import refused
from cb_rollout.engine.memory import device as devices
from cb_rollout.errors import WeightSyncError, abbreviated


class WeightSynchronizer:
    """Keep the module that generates up to date. Called while the engine is paused."""

    module: PreTrainedModel
    """Module that generates. The storage of a parameter moves only if its ties or dtype change."""
    trained: torch.nn.Module
    """Training module, maybe wrapped. Verification compares log-probabilities with its forward."""
    autocast_dtype: torch.dtype | None
    """Autocast dtype of both modules' forwards; None: no autocast."""
    selection: str = ""
    """Phrase that says how adapters run on a GPU, and why; "" elsewhere."""
    is_collective: bool = False
    """True: a sync, and a forward of `trained`, need every process at once."""
    _released: tuple[tuple[torch.UntypedStorage, int], ...] = ()
    """Storages without memory until the next sync, and the bytes of each."""

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a re-wrapped model as the weight source.

        Raises:
            WeightSyncError: shared weights are those of another module.
        """
        raise NotImplementedError

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether a model, wrapped or not, has the module inside whose weights these are."""
        raise NotImplementedError

    def sync(self) -> int:
        """Take over the trained weights, and return the number of bytes written.

        Raises:
            ConfigurationError: the model was sharded meanwhile; no process can run it alone.
            WeightSyncError: the tensors of the two modules do not match; nothing was copied.
        """
        raise NotImplementedError

    def differing(self) -> list[str]:
        """Return the names of the tensors that a sync would change now."""
        return []

    def stale_weights(self) -> dict[str, torch.Tensor]:
        """Return the copy's tensors by name if a sync would change any.

        Empty: it would change none, or they cannot be compared here.
        """
        is_unknown = self.is_collective or self._released
        return {} if is_unknown or not self.differing() else dict(self.module.state_dict())

    def own_weights(self) -> list[torch.Tensor]:
        """List the weights that the training module does not hold.

        `ConfigurationError`: it holds all.
        """
        raise refused("released weights, shared")

    def release(self) -> None:
        """Free the memory of `own_weights` until the next sync.

        Tensors and storages keep their identity. A forward would read address 0.
        """
        weights = [local_part(weight) for weight in self.own_weights()]
        for storage in (weight.untyped_storage() for weight in weights):
            if num_bytes := storage.nbytes():
                self._released += ((storage, num_bytes),)
                storage.resize_(0)
        for device in {weight.device for weight in weights}:
            devices.empty_cache(device)


class SharedWeights(WeightSynchronizer):
    """The training module in both roles: nothing is copied."""

    def __init__(self, trained: torch.nn.Module, autocast_dtype: torch.dtype | None) -> None:
        """Generate with a training module, wrapped or not."""
        self.module, self.trained = hf_compat.unwrap(trained), trained
        self.autocast_dtype = autocast_dtype

    def follow(self, trained: torch.nn.Module) -> None:
        module = hf_compat.unwrap(trained)
        if module is not self.module:
            raise WeightSyncError(
                f"follow() got another {type(module).__name__} than the one that generates, whose "
                "weights are shared with its trainer; make a RolloutGenerator of the new model, or "
                "set weight_sync='copy', which can follow a model of the same shape."
            )
        self.trained = trained

    def sync(self) -> int:
        # The wrapper may hold another module by now.
        self.follow(self.trained)
        hf_compat.refuse_sharded(self.module)
        return 0

    def is_of(self, model: torch.nn.Module) -> bool:
        return hf_compat.unwrap(model) is self.module


def require_equal(weights: WeightSynchronizer) -> None:
    """Raise `WeightSyncError` if any tensor of the two modules differs."""
    names = weights.differing()
    if names:
        raise WeightSyncError(
            f"{len(names)} tensors of the rollout copy differ from the training module after a "
            f"sync: {abbreviated(names)}. Writes to a frozen tensor through .data "
            "are not detected (write it under torch.no_grad() instead, or give it requires_grad); "
            "a trainable one was written while it was copied, by another thread, or in the copy."
        )
