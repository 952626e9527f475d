"""Compute a model's forwards as `numerics="bitwise"` computes them: `bitwise(model)`.

It refuses models and devices whose rows would not have the same bits in every batch. Any thread may
call; the installed operators serve every thread.
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
from cb_rollout.engine.numerics.kernels import DTYPES, kernel
from cb_rollout.errors import ConfigurationError, error_text

# RoPE types of transformers 5.23 whose frequencies depend on the batch's longest row.
_ROPE_OF_A_BATCH = ("dynamic", "longrope")


@contextmanager
def bitwise(model: torch.nn.Module) -> Iterator[None]:
    """Compute forwards in which a row's logits are bitwise the same in every batch.

    Inside the block, in every thread and for every model, a row's matrix products, attention,
    activations and norms do not depend on other rows, on padding at either end, on chunks or on the
    number of threads. Gradients are those of PyTorch's own operators. Without `position_ids`,
    positions follow `attention_mask`, as in `generate`. Blocks may be nested.

    Args:
        model: a transformers causal language model on a CPU, plain or wrapped, whose forward
            computes in float32 or bfloat16.

    Raises:
        ConfigurationError: the model cannot be computed this way.
    """
    inner = hf_compat.unwrap(model)
    refuse_what_is_not_bitwise(inner)
    with operators.installed(), hf_compat.computing_attention(attend), _counting_tokens(inner):
        yield


def refuse_what_is_not_bitwise(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` for a model that cannot give the same bits in every batch."""
    reason = _obstacle(model)
    if reason is not None:
        raise ConfigurationError(f"numerics='bitwise': {reason}.")


def _obstacle(model: PreTrainedModel) -> str | None:
    """Return why a row's bits would depend on its batch, and what to do; None if they would not."""
    device = next(model.parameters()).device
    if device.type != "cpu":
        return f"the model is on {device.type}, which has no ordered kernels; it runs on a CPU"
    compiler_obstacle = inductor.compiler_obstacle()
    if compiler_obstacle:
        return (
            f"its kernels need a C++ compiler, g++ or the one that CXX names ({compiler_obstacle})"
        )
    dtype = torch_compat.compute_dtype(model)
    if dtype not in DTYPES:
        return f"the model computes in {dtype}; load it in float32 or bfloat16"
    if hf_compat.is_quantized(model):
        return "products of quantised weights have kernels of their own; load it unquantised"
    num_processes = getattr(model, "tp_size", None) or 1
    if num_processes > 1:
        return f"the model is split over {num_processes} tensor-parallel processes; load it whole"
    rope_type = _rope_of_a_batch(model)
    if rope_type is not None:
        return (
            f"rope_type={rope_type!r} takes its frequencies from the longest row of a batch; leave "
            "numerics at 'fast'"
        )
    for site in torch_compat.dropout_sites(model):
        if site.rate > 0 and site.module.training:
            return f"{site.name} drops activations at random in training; set it to 0"
    return _kernel_obstacle(dtype)


def _kernel_obstacle(dtype: torch.dtype) -> str | None:
    """Return why a kernel of the forward cannot run; None if all can."""
    try:
        for name in ("multiply", "multiply_batch", "attend_masked"):
            kernel(name, dtype)
    except Exception as error:  # noqa: BLE001  it is the answer
        return f"{error_text(error)}; leave numerics at 'fast'"
    return None


def _rope_of_a_batch(model: PreTrainedModel) -> str | None:
    """Return the model's RoPE type whose frequencies depend on the batch; None if it has none."""
    for _, types in rotary_modules(model):
        for rope_type in types.values():
            if rope_type in _ROPE_OF_A_BATCH:
                return rope_type
    return None


@contextmanager
def _counting_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Count positions from a row's first token if the caller passes a mask but no positions.

    Otherwise transformers 5.23 counts columns, and padding would change a row's rotations.
    """
    with ExitStack() as stack:
        for module in _modules_that_count(model):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if "position_ids" in names:
                handle = module.register_forward_pre_hook(_position_hook(names), with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _modules_that_count(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    """Yield the modules that make positions if the caller passes none.

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
