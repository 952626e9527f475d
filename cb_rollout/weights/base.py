"""Define how the generating module follows the trainer's weights; the simplest way is sharing."""

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.fsdp import local_part
from cb_rollout.config.combinations import refused
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.adapters import AdapterSource
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
    """Phrase that says how adapters run on a GPU, and why; "" on other devices."""
    adapters: AdapterSource | None = None
    """Source of the adapters that sequences may name; None: the adapters inside `module`."""
    is_collective: bool = False
    """True: a sync, and a forward of `trained`, need every process at once."""
    _released: tuple[tuple[torch.UntypedStorage, int], ...] = ()
    """Storages whose memory is released until the next sync, with the bytes of each."""

    def follow(self, trained: torch.nn.Module) -> None:
        """Take a re-wrapped model as the weight source.

        Raises:
            WeightSyncError: weights are shared, and the wrapper contains another module.
        """
        raise NotImplementedError

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether a model, wrapped or not, contains the module that these weights follow."""
        raise NotImplementedError

    def sync(self) -> int:
        """Copy the trained weights, and return the number of bytes written.

        Raises:
            ConfigurationError: the model has been sharded since; no process can run it alone.
            WeightSyncError: the tensors of the two modules do not match; nothing was copied.
        """
        raise NotImplementedError

    def differing(self) -> list[str]:
        """Return the names of the tensors that a sync would change now."""
        return []

    def stale_weights(self) -> dict[str, torch.Tensor]:
        """Return the copy's tensors by name if a sync would change any.

        Empty: a sync would change none, or they cannot be compared here.
        """
        if self.is_collective or self._released:
            return {}
        if not self.differing():
            return {}
        return dict(self.module.state_dict())

    def own_weights(self) -> list[torch.Tensor]:
        """List the weights that belong to the copy alone.

        Raises `ConfigurationError` if all weights are shared.
        """
        raise refused("released weights, shared")

    def release(self) -> None:
        """Free the memory of `own_weights` until the next sync.

        Tensors and storages keep their identity. A forward would read address 0.
        """
        weights = [local_part(weight) for weight in self.own_weights()]
        for weight in weights:
            storage = weight.untyped_storage()
            num_bytes = storage.nbytes()
            # Weights that share a storage release it once.
            if num_bytes > 0:
                self._released += ((storage, num_bytes),)
                storage.resize_(0)
        for device in {weight.device for weight in weights}:
            devices.empty_cache(device)


class SharedWeights(WeightSynchronizer):
    """The training module in both roles: nothing is copied."""

    def __init__(self, trained: torch.nn.Module, autocast_dtype: torch.dtype | None) -> None:
        """Generate with a training module, wrapped or not."""
        self.module = hf_compat.unwrap(trained)
        self.trained = trained
        self.autocast_dtype = autocast_dtype

    def follow(self, trained: torch.nn.Module) -> None:
        module = hf_compat.unwrap(trained)
        if module is not self.module:
            raise WeightSyncError(
                f"follow() got a different {type(module).__name__} from the one that generates, "
                "whose weights are shared with its trainer; make a RolloutGenerator for the new "
                "model, or set weight_sync='copy', which can follow a model of the same shape."
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
            f"sync: {abbreviated(names)}. If a tensor is frozen, it was probably written through "
            ".data, which is not detected: write it under torch.no_grad(), or set requires_grad. "
            "If it is trainable, another thread wrote it during the copy, or something wrote to "
            "the copy itself."
        )
