"""Compute a model's forwards as `numerics="bitwise"` computes them: `bitwise(model)`.

Refuses models and devices whose rows would not be the same bits in every batch. Any thread may
call; what it installs serves every thread.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import inductor
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.rope import rotary_modules
from cb_rollout.engine.numerics import operators
from cb_rollout.engine.numerics.attention import attend
from cb_rollout.engine.numerics.kernels import DTYPES
from cb_rollout.errors import ConfigurationError

# RoPE types of transformers 5.23 whose frequencies follow the longest row of a batch.
_ROPE_OF_A_BATCH = ("dynamic", "longrope")


@contextmanager
def bitwise(model: torch.nn.Module) -> Iterator[None]:
    """Compute forwards so that a row's logits are the same bits in every batch.

    Inside, in every thread and for every model: products, attention, activations and norms of one
    row do not depend on other rows, on padding at either end, on chunks or on threads. Gradients
    are those of PyTorch's own operators. Without `position_ids`, positions count a row's tokens of
    `attention_mask`, as `generate` counts them. May be nested.

    Args:
        model: a transformers causal language model on a CPU, plain or wrapped, whose forward
            computes in float32 or bfloat16.

    Raises:
        ConfigurationError: the model cannot be computed so.
    """
    inner = hf_compat.unwrap(model)
    refuse_what_is_not_bitwise(inner)
    with operators.installed(), hf_compat.computing_attention(attend), _counting_tokens(inner):
        yield


def refuse_what_is_not_bitwise(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` for a model that cannot give the same bits in every batch."""
    device = next(model.parameters()).device
    reason, sites = None, torch_compat.dropout_sites(model)
    ropes = (name for _, types in rotary_modules(model) for name in types.values())
    if device.type != "cpu":
        reason = f"the model is on {device.type}, which has no ordered kernels; it runs on a CPU"
    elif obstacle := inductor.compiler_obstacle():
        reason = f"its kernels need a C++ compiler, g++ or the one that CXX names ({obstacle})"
    elif (dtype := torch_compat.compute_dtype(model)) not in DTYPES:
        reason = f"the model computes in {dtype}; load it in float32 or bfloat16"
    elif hf_compat.is_quantized(model):
        reason = "products of quantised weights have kernels of their own; load it unquantised"
    elif (getattr(model, "tp_size", None) or 1) > 1:
        reason = f"the model is split over {model.tp_size} tensor-parallel processes; load it whole"
    elif rope := next((name for name in ropes if name in _ROPE_OF_A_BATCH), None):
        reason = (
            f"rope_type={rope!r} takes its frequencies from the longest row of a batch; leave "
            "numerics at 'fast'"
        )
    elif dropping := [s.name for s in sites if s.rate > 0 and s.module.training]:
        reason = f"{dropping[0]} drops activations at random in training; set it to 0"
    if reason:
        raise ConfigurationError(f"numerics='bitwise': {reason}.")


@contextmanager
def _counting_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Count positions from a row's first token where the caller gives a mask and no positions.

    Else transformers 5.23 counts columns, and a padded row's rotations would be other numbers.
    """
    with ExitStack() as stack:
        for module in _modules_that_count(model):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if "position_ids" in names:
                handle = module.register_forward_pre_hook(_position_hook(names), with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _modules_that_count(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Yield the modules that make positions where they are given none.

    Some models with images make them above their language model (Gemma 3). Positions of several
    axes are made from the mask already.
    """
    if not any(hasattr(module, "get_rope_index") for module in model.modules()):
        yield model
    try:
        yield hf_compat.backbone_of(model)
    except ConfigurationError:
        # The model's head and its layers are one module.
        yield model


def _position_hook(names: list[str]) -> Callable[..., Any]:
    """Return a hook of a module whose forward has these arguments; see `CAPTURED_HOOKS`."""

    def give_positions(
        _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # The arguments after the positional ones are named, or left at their defaults.
        passed = dict(zip(names, args, strict=False)) | kwargs
        mask = passed.get("attention_mask")
        counted_by = ("position_ids", *hf_compat.CACHE_ARGUMENTS)
        is_counted = any(passed.get(name) is not None for name in counted_by)
        if is_counted or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return args, kwargs | {"position_ids": positions}

    return give_positions
