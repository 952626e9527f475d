"""List the causes that need a forward of their own, as changes of the trainer's forward.

Owns which changes are worth a forward, for a model and for what the caller passed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product, takewhile
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from cb_rollout.compat.rope import rotary_modules
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.audit.evidence import Prediction
from cb_rollout.rollout.audit.forwards import Change, Forwards, Weights, without_adapters
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.weights.adapters import low_ranks_of

# Blocks of vLLM, SGLang and this package: whole ones are found again.
BLOCK_SIZES = (16, 32)

# Offsets of positions: off by one, and the two places that OPT's embeddings begin with.
OFFSETS = (-1, 1, 2)

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


class Hypothesis(NamedTuple):
    """One cause, and what follows from it."""

    cause: Cause
    detail: str
    effect: Change | Prediction
    """The forward that it implies, or what it reads from logits that are there already."""
    num_fitted: int = 0
    """Parameters that were fitted to the reported numbers."""
    noise_share: float = 0.0
    """Its own rounding, as a share of how far it moves log-probabilities; 0: the trainer's."""


def hypotheses(
    forwards: Forwards, versions: Mapping[str, Weights], tokenizer: Any
) -> Iterator[Hypothesis]:
    """Yield every cause that can be tested on these sequences."""
    # Before versions: a new adapter changes nothing, so its first version is the base model too.
    yield from _adapters(forwards.inner)
    for name, weights in versions.items():
        yield Hypothesis(Cause.OLDER_VERSION, name, Change(weights))
        if "past_key_values" in forwards.argument_names:
            yield from _stale_prompts(forwards, name, weights)
    yield from _precisions(forwards.inner)
    yield from _quantised(forwards.inner)
    for cause, detail, prompts in _prompts(forwards, tokenizer):
        yield Hypothesis(cause, detail, Change(prompts=prompts))
    ropes = {rope for _, types in rotary_modules(forwards.inner) for rope in types.values()}
    if ropes & {"longrope", "dynamic"}:
        longest = max(row.num_tokens for row in forwards.rows)
        for length in (longest, forwards.inner.config.get_text_config().max_position_embeddings):
            yield Hypothesis(Cause.ROPE, f"{length} tokens", Change(longest=length))
    if "position_ids" in forwards.argument_names:
        yield from _positions([len(row.prompt_ids) for row in forwards.rows])
    if all(row.routes is not None for row in forwards.rows):
        yield Hypothesis(Cause.ROUTES, "", Change(replays_routes=True))


def _stale_prompts(forwards: Forwards, name: str, weights: Weights) -> Iterator[Hypothesis]:
    # The last token of a prompt is always computed: its logits are needed.
    lengths = [len(row.prompt_ids) - 1 for row in forwards.rows]
    columns = zip(*(row.prompt_ids for row in forwards.rows), strict=False)
    shared = len(list(takewhile(lambda ids: len({*ids}) == 1, columns)))
    tried = {f"first {shared} tokens": tuple(min(shared, n) for n in lengths)}
    tried |= {f"blocks of {size}": tuple(n // size * size for n in lengths) for size in BLOCK_SIZES}
    tried["whole prompts"] = tuple(lengths)
    for counts, what in {counts: what for what, counts in tried.items() if any(counts)}.items():
        change = Change(cached_weights=weights, num_cached=counts)
        yield Hypothesis(Cause.STALE_PROMPT_KEYS, f"{name}, {what}", change)


def _adapters(inner: torch.nn.Module) -> Iterator[Hypothesis]:
    """Yield an adapter left out, taken for another, applied twice, or merged in 16 bits."""
    without, own = without_adapters(inner), dict(inner.named_parameters())
    if not without:
        return
    yield Hypothesis(Cause.NO_ADAPTER, "base model", Change(without))
    yield Hypothesis(Cause.ADAPTER_TWICE, "", Change({name: 2 * own[name] for name in without}))
    layers: list[Any] = [module for module in inner.modules() if hasattr(module, "lora_B")]
    active = sorted({name for layer in layers for name in layer.active_adapters})
    others = sorted({name for layer in layers for name in layer.lora_B} - {*active})
    for mine, other in product(active[:1], others):
        pairs = ((name.replace(f".{other}.", f".{mine}."), p) for name, p in own.items())
        swapped = {n: p for n, p in pairs if f".{mine}." in n and p is not own.get(n)}
        yield Hypothesis(Cause.OTHER_ADAPTER, other, Change(swapped))
    with suppress(ConfigurationError):
        # Refuses adapters that are no low-rank product, such as DoRA's.
        rounded = {name: w.bfloat16().to(w.dtype) for name, w in _merged(inner).items()}
        yield Hypothesis(Cause.ADAPTER_MERGED, "bfloat16", Change({**rounded, **without}))


def _merged(inner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the base weights with their active adapters added, by name."""
    merged: dict[str, torch.Tensor] = {}
    for name, module in inner.named_modules():
        layer: Any = module
        for low in low_ranks_of(module):
            key = f"{name}.base_layer.weight"
            base: Any = merged.get(key, layer.base_layer.weight.detach())
            delta = low.delta(low.A.detach(), low.B.detach(), torch.float32, None)
            merged[key] = (base.float() + delta).to(base.dtype)
    return merged


def _precisions(inner: Any) -> Iterator[Hypothesis]:
    """Yield a model, and a head, in bfloat16 where the trainer has float32."""
    own = {name: p for name, p in inner.named_parameters() if p.dtype == torch.float32}
    if not own or torch.is_autocast_enabled(inner.device.type):
        return
    short = Change({name: p.detach().bfloat16() for name, p in own.items()})
    yield Hypothesis(Cause.MODEL_16BIT, "bfloat16", short, noise_share=1.0)
    if isinstance(inner.get_output_embeddings(), torch.nn.Linear):
        # Two kernels for one product agree better than two precisions.
        change = Change(head_dtype=torch.bfloat16)
        yield Hypothesis(Cause.HEAD_16BIT, "bfloat16", change, noise_share=0.25)


def _quantised(inner: Any) -> Iterator[Hypothesis]:
    """Yield linear weights in 8 bits: integers with a scale for each output, floats with one."""
    head, linear = inner.get_output_embeddings(), (torch.nn.Linear, Conv1D)
    layers = {n: m for n, m in inner.named_modules() if isinstance(m, linear) and m is not head}
    layers = {n: m for n, m in layers.items() if m.weight.is_floating_point() and "lora_" not in n}
    for dtype, largest in ((torch.int8, 127), (torch.float8_e4m3fn, 448)):
        weights = {}
        for name, layer in layers.items():
            weight: torch.Tensor = layer.weight.detach().float()
            axes = (0 if isinstance(layer, Conv1D) else 1) if dtype is torch.int8 else (0, 1)
            levels = weight * (largest / weight.abs().amax(axes, keepdim=True))
            rounded = levels.round() if dtype is torch.int8 else levels.to(dtype).float()
            weights[f"{name}.weight"] = (weight * rounded / levels).nan_to_num().to(layer.weight)
        # Activations may be rounded too.
        detail = str(dtype).removeprefix("torch.")
        yield Hypothesis(Cause.QUANTISED, detail, Change(weights), noise_share=0.25)


def _prompts(
    forwards: Forwards, tokenizer: Any
) -> Iterator[tuple[Cause, str, Sequence[Sequence[int]]]]:
    """Yield prompts that were tokenised or padded otherwise."""
    config = forwards.inner.config.get_text_config()
    bos, pad = (
        getattr(config, name, None) if tokenizer is None else getattr(tokenizer, name)
        for name in ("bos_token_id", "pad_token_id")
    )
    own = [list(row.prompt_ids) for row in forwards.rows]
    if isinstance(bos, int):
        yield Cause.BOS_TWICE, "", [[bos, *prompt] for prompt in own]
        yield Cause.BOS_MISSING, "", [prompt[prompt[:-1][:1] == [bos] :] for prompt in own]
    if tokenizer is not None:
        special = set(tokenizer.all_special_ids)
        kept = [[token for token in prompt if token not in special] for prompt in own]
        yield Cause.SPECIAL_TOKENS_DROPPED, "", [a or b for a, b in zip(kept, own, strict=True)]
        texts = [tokenizer.decode(prompt) for prompt in own]
        for adds in (False, True):
            again = tokenizer(text=texts, add_special_tokens=adds)["input_ids"]
            detail = "special tokens added" if adds else ""
            yield Cause.RETOKENISED, detail, [a or b for a, b in zip(again, own, strict=True)]
        if getattr(tokenizer, "chat_template", None):
            chats = [[{"role": "user", "content": text}] for text in texts]
            # A template may refuse a chat of one message of the user.
            with suppress(Exception):
                again = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
                yield Cause.TEMPLATE_TWICE, "", again["input_ids"]
    if isinstance(pad, int):
        longest = max(map(len, own))
        yield Cause.PADDING_ATTENDED, "", [[pad] * (longest - len(p)) + p for p in own]


def _positions(lengths: Sequence[int]) -> Iterator[Hypothesis]:
    """Yield positions that are counted otherwise, for prompts of these lengths."""
    longest = max(lengths)
    tried = {f"completions by {by:+d}": [(0, by)] * len(lengths) for by in OFFSETS}
    tried |= {f"all by {by:+d}": [(by, by)] * len(lengths) for by in OFFSETS if by > 0}
    tried["padding counted"] = [(longest - length, longest - length) for length in lengths]
    for detail, offsets in tried.items():
        yield Hypothesis(Cause.POSITIONS, detail, Change(offsets=offsets))


def layer_hypotheses(versions: Mapping[str, Weights]) -> Iterator[Hypothesis]:
    """Yield each layer of each version among the trainer's other layers."""
    for version, weights in versions.items():
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights.items():
            match = LAYER.search(name)
            # Outside the layers: embeddings, the last norm, the head.
            layers.setdefault(f"layer {match[1]}" if match else name, {})[name] = tensor
        for layer, tensors in layers.items():
            detail = f"{layer} of {version}"
            yield Hypothesis(Cause.STALE_LAYER, detail, Change(tensors), num_fitted=1)
