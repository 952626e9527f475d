"""Compute a model's attention by the ordered kernel, with the gradients of the model's function.

Replaces the functions that transformers looks up as `sdpa` and `eager`. Called at every layer of a
forward, and of its backward pass.

B: rows, H: query heads, K: key heads, Q: queries, S: keys, D: size of a key, E: size of a value.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.numerics import kernels, operators
from cb_rollout.errors import ConfigurationError

# Arguments of attention functions that change the scores in a way the kernel does not support.
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
    """Attend like the model's own attention function, up to rounding, in one order of keys.

    Args:
        own_attention: the model's function, which gives the gradients.
        module: the layer that calls it.
        query: `[B, H, Q, D]`, as for sdpa.
        key: `[B, K, S, D]`.
        value: `[B, K, S, E]`.
        attention_mask: broadcasts to `[B, H, Q, S]`, True or 0 where a key is seen; None: causal.
        arguments: what the layer passes to its function besides these.

    Returns:
        `[B, Q, H, E]`, and no weights.

    Raises:
        ConfigurationError: the kernel does not compute this attention.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    reason = _obstacle(module, query, attention_mask, arguments)
    if reason:
        raise ConfigurationError(f"numerics='bitwise': {reason}.")
    sinks = arguments.get("s_aux")
    settings = _settings(module, query, key, attention_mask, arguments)
    tensors = [query, key, value]
    if sinks is not None:
        tensors.append(sinks)
    needs_gradients = any(tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and needs_gradients:
        call = _Call(own_attention, module, attention_mask, arguments, settings)
        return _Attention.apply(call, query, key, value, sinks), None
    return kernels.attend(query, key, value, attention_mask, sinks_H=sinks, **settings), None


def _obstacle(
    module: torch.nn.Module,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    arguments: Mapping[str, Any],
) -> str | None:
    """Return why the kernel cannot compute this attention, and what to do; None: it can."""
    name = type(module).__name__
    device = query.device.type
    dtype = query.dtype
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
    rate = arguments.get("dropout")
    if rate:
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
    """Return the kernel's other arguments, as transformers' sdpa function reads them (5.23).

    Args:
        module: the layer.
        query: its queries.
        key: its keys.
        mask: its mask; None: it has none.
        arguments: what the layer passes to its attention function.
    """
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = bool(is_causal) and mask is None and query.shape[2] > 1
    if is_causal and query.shape[2] != key.shape[2]:
        raise ConfigurationError(
            f"numerics='bitwise': {type(module).__name__} attends causally from {query.shape[2]} "
            f"queries to {key.shape[2]} keys without a mask; {_STAY_FAST}."
        )
    scale = arguments.get("scaling")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    return {"scale": float(scale), "is_causal": is_causal, "softcap": arguments.get("softcap")}


class _Call(NamedTuple):
    """One call of a layer's attention function."""

    own_attention: Callable[..., Any]
    module: torch.nn.Module
    mask: torch.Tensor | None
    arguments: dict[str, Any]
    """Arguments that the layer passed to its function besides states and mask."""
    settings: dict[str, Any]
    """The kernel's other arguments."""


class _Attention(torch.autograd.Function):
    """The ordered kernel, and the gradients of the model's own attention function."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend by the ordered kernel; see `kernels.attend`.

        Args:
            ctx: torch's context of the backward pass.
            call: the layer's call, with mask and settings.
            query: `[B, H, Q, D]`.
            key: `[B, K, S, D]`.
            value: `[B, K, S, E]`.
            sinks: `[H]`; None: the layer has none.
        """
        ctx.call = call
        ctx.save_for_backward(query, key, value, sinks)
        return kernels.attend(query, key, value, call.mask, sinks_H=sinks, **call.settings)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        call: _Call = ctx.call
        # Of queries, keys, values and sinks.
        needed = ctx.needs_input_grad[1:]
        query, key, value, sinks = ctx.saved_tensors
        query = query.detach().requires_grad_(needed[0])
        key = key.detach().requires_grad_(needed[1])
        value = value.detach().requires_grad_(needed[2])
        arguments = call.arguments
        if sinks is not None:
            # Not detached: some functions read the module's own parameter (GPT-OSS in 5.23).
            arguments = arguments | {"s_aux": sinks}
        with torch.enable_grad(), operators.torchs_own():
            output, _ = call.own_attention(call.module, query, key, value, call.mask, **arguments)
        states: list[Any] = [query, key, value, sinks]
        indices = [index for index, is_needed in enumerate(needed) if is_needed]
        inputs = [states[index] for index in indices]
        found = torch.autograd.grad(output, inputs, grad_outputs, allow_unused=True)
        gradients: list[torch.Tensor | None] = [None] * len(states)
        for index, gradient in zip(indices, found, strict=True):
            gradients[index] = gradient
        return None, *gradients
