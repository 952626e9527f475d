"""List the causes that need a forward of their own, as changes of the trainer's forward.

Owns which changes are worth a forward, for a model and for what the caller passed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch

from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.audit.forwards import Change, Forwards, Weights
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.weights.adapters import has_adapters, low_ranks_of

# Blocks of vLLM, SGLang and this package: whole ones are found again.
BLOCK_SIZES = (16, 32)

# Offsets of positions: off by one, and the two places that OPT's embeddings begin with.
OFFSETS = (-1, 1, 2)

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


class Hypothesis(NamedTuple):
    """One cause, and the forward that it implies."""

    cause: Cause
    detail: str
    change: Change
    noise_share: float = 0.0
    """Its own rounding, as a share of how far it moves log-probabilities; 0: the trainer's."""


def hypotheses(
    forwards: Forwards, versions: Mapping[str, Weights], tokenizer: Any
) -> Iterator[Hypothesis]:
    """Yield every cause that can be tested on these sequences."""
    for name, weights in versions.items():
        yield Hypothesis(Cause.OLDER_VERSION, name, Change(weights))
        if "past_key_values" in forwards.argument_names:
            yield from _stale_prompts(forwards, name, weights)
    yield from _adapters(forwards.inner)
    yield from _precisions(forwards.inner)
    for cause, detail, prompts in _prompts(forwards, tokenizer):
        yield Hypothesis(cause, detail, Change(prompts=prompts))
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
    if not has_adapters(inner):
        return
    own = dict(inner.named_parameters())
    without = {n: torch.zeros_like(p) for n, p in own.items() if "lora_" in n and "_B" in n}
    yield Hypothesis(Cause.NO_ADAPTER, "base model", Change(without))
    layers: list[Any] = [module for module in inner.modules() if hasattr(module, "lora_B")]
    active = {name for layer in layers for name in layer.active_adapters}
    for other in sorted({name for layer in layers for name in layer.lora_B} - active):
        mine = f".{min(active)}."
        pairs = ((name.replace(f".{other}.", mine), p) for name, p in own.items())
        swapped = {name: p for name, p in pairs if mine in name and p is not own.get(name)}
        yield Hypothesis(Cause.OTHER_ADAPTER, other, Change(swapped))
    try:
        merged = _merged(inner)
    except ConfigurationError:
        # Adapters that are no low-rank product, such as DoRA's.
        return
    yield Hypothesis(Cause.ADAPTER_TWICE, "", Change(merged))
    rounded = {name: w.bfloat16().to(w.dtype) for name, w in merged.items()}
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
    if isinstance(pad, int):
        longest = max(map(len, own))
        yield Cause.PADDING_ATTENDED, "", [[pad] * (longest - len(p)) + p for p in own]


def _positions(lengths: Sequence[int]) -> Iterator[Hypothesis]:
    """Yield positions that are counted otherwise, for prompts of these lengths."""
    for offset in OFFSETS:
        change = Change(completion_offset=offset)
        yield Hypothesis(Cause.POSITIONS, f"completions by {offset:+d}", change)
        if offset > 0:
            change = Change(prompt_offsets=[offset] * len(lengths))
            yield Hypothesis(Cause.POSITIONS, f"all by {offset:+d}", change)
    padding = [max(lengths) - length for length in lengths]
    yield Hypothesis(Cause.POSITIONS, "padding counted", Change(prompt_offsets=padding))


def layer_hypotheses(versions: Mapping[str, Weights]) -> Iterator[Hypothesis]:
    """Yield each layer of each version among the trainer's other layers."""
    for version, weights in versions.items():
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights.items():
            match = LAYER.search(name)
            # Outside the layers: embeddings, the last norm, the head.
            layers.setdefault(f"layer {match[1]}" if match else name, {})[name] = tensor
        for layer, tensors in layers.items():
            yield Hypothesis(Cause.STALE_LAYER, f"{layer} of {version}", Change(tensors))
