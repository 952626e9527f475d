"""Compute a model's attention by the ordered kernel, with the gradients of its own function.

Replaces the functions that transformers looks up as `sdpa` and `eager`. Called at every layer of a
forward, and of its backward pass.

B: rows, H: query heads, K: key heads, Q: queries, S: keys, D: size of a key, E: size of a value.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.numerics import kernels, operators
from cb_rollout.errors import ConfigurationError

# Arguments of an attention function that add to the scores what the kernel does not know.
_UNKNOWN = ("position_bias", "head_mask", "cache")

_STAY_FAST = "leave numerics at 'fast'"


def attend(
    own_attention: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Return what the model's own attention function does, to rounding, in one order of keys.

    Takes states as sdpa does, and a mask that broadcasts to `[B, H, Q, S]`, True or 0 where a key
    is seen; None: causal. Returns `[B, Q, H, E]`, and no weights. `own_attention` gives gradients.

    Raises:
        ConfigurationError: the kernel does not compute this attention.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (states.to(dtype) for states in (query, key, value))
    if reason := _obstacle(module, query, attention_mask, arguments):
        raise ConfigurationError(f"numerics='bitwise': {reason}.")
    sinks = arguments.get("s_aux")
    settings = _settings(module, query, key, attention_mask, arguments)
    states = (query, key, value, sinks)
    needs_gradients = any(tensor is not None and tensor.requires_grad for tensor in states)
    if torch.is_grad_enabled() and needs_gradients:
        call = (own_attention, module, attention_mask, arguments)
        return _Attention.apply(call, settings, *states), None
    return kernels.attend(query, key, value, attention_mask, sinks_H=sinks, **settings), None


def _obstacle(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: Mapping[str, Any],
) -> str | None:
    """Return why the kernel cannot compute this attention, and what to do; None: it can."""
    name = type(module).__name__
    device, dtype = query.device.type, query.dtype
    implementation = hf_compat.attention_implementation(module)
    unknown = [argument for argument in _UNKNOWN if arguments.get(argument) is not None]
    if device != "cpu" or dtype not in kernels.DTYPES:
        return f"{name} attends in {dtype} on {device}, not in float32 or bfloat16 on a CPU"
    if implementation not in ("sdpa", "eager"):
        return (
            f"attn_implementation={implementation!r} computes by kernels of its own; load the "
            "model with 'sdpa' or 'eager'"
        )
    if unknown:
        return f"{name} attends with {', '.join(unknown)}, which has no kernel; {_STAY_FAST}"
    if rate := arguments.get("dropout"):
        return f"{name} drops attention weights (rate {rate:g}); set attention_dropout=0"
    if mask is not None and mask.dim() != 4:
        return f"{name} attends with a mask of {mask.dim()} dimensions, not of 4; {_STAY_FAST}"
    return None


def _settings(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the kernel's other arguments, as transformers' sdpa function reads them (5.23)."""
    scale, is_causal = arguments.get("scaling"), arguments.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and mask is None and query.shape[2] > 1
    if is_causal and query.shape[2] != key.shape[2]:
        raise ConfigurationError(
            f"numerics='bitwise': {type(module).__name__} attends causally from {query.shape[2]} "
            f"queries to {key.shape[2]} keys without a mask; {_STAY_FAST}."
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return {"scale": scale, "is_causal": is_causal, "softcap": arguments.get("softcap")}


class _Attention(torch.autograd.Function):
    """The ordered kernel, and the gradients of the model's own attention function."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Any, ...],
        settings: dict[str, Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks)
        return kernels.attend(query, key, value, call[2], sinks_H=sinks, **settings)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        own_attention, module, mask, arguments = ctx.call
        needed = ctx.needs_input_grad[2:]
        *inputs, sinks = ctx.saved_tensors
        query, key, value = (
            states.detach().requires_grad_(is_needed)
            for states, is_needed in zip(inputs, needed[:3], strict=True)
        )
        # Not detached: some functions read the module's own parameter (GPT-OSS in 5.23).
        states = (query, key, value, sinks)
        if sinks is not None:
            arguments = arguments | {"s_aux": sinks}
        with torch.enable_grad(), operators.torchs_own():
            output, _ = own_attention(module, query, key, value, mask, **arguments)
        wanted = [states for states, is_needed in zip(states, needed, strict=True) if is_needed]
        grads = iter(torch.autograd.grad(output, wanted, grad_outputs, allow_unused=True))
        return None, None, *(next(grads) if is_needed else None for is_needed in needed)
