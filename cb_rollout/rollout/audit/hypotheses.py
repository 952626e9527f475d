"""List the causes that need a forward of their own, as changes of the trainer's forward.

Owns which changes are worth a forward, for a model and for what the caller passed.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import product, takewhile
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.compat.rope import rotary_modules
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.errors import ConfigurationError
from cb_rollout.packing.batch import RowImages, with_images
from cb_rollout.rollout.audit.evidence import Prediction
from cb_rollout.rollout.audit.forwards import Change, Forwards, Weights, without_adapters
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.weights.adapters import low_ranks_of

# Blocks of vLLM, SGLang and this package: whole ones are found again.
BLOCK_SIZES = (16, 32)

# Offsets of positions: off by one, and the two places that OPT's embeddings begin with.
OFFSETS = (-1, 1, 2)

# Other prompts, the nearest in order, whose images each prompt is tested with.
MAX_STEPS = 15

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
    forwards: Forwards, versions: Mapping[str, Weights], tokenizers: Mapping[str, Any]
) -> Iterator[Hypothesis]:
    """Yield every cause that can be tested on these sequences.

    The tokenizer named "" is the trainer's, or None.
    """
    # Before versions: a new adapter changes nothing, so its first version is the base model too.
    yield from _adapters(forwards.inner)
    for name, weights in versions.items():
        yield Hypothesis(Cause.OLDER_VERSION, name, Change(weights))
        if "past_key_values" in forwards.argument_names:
            yield from _stale_prompts(forwards, name, weights)
    yield from _precisions(forwards.inner)
    yield from _quantised(forwards.inner)
    # Other prompts and lengths would move the images.
    is_text = all(row.images is None for row in forwards.rows)
    yield from _prompts(forwards, tokenizers) if is_text else _images(forwards)
    ropes = {rope for _, types in rotary_modules(forwards.inner) for rope in types.values()}
    if is_text and ropes & {"longrope", "dynamic"}:
        longest = max(row.num_tokens for row in forwards.rows)
        for length in (longest, forwards.inner.config.get_text_config().max_position_embeddings):
            yield Hypothesis(Cause.ROPE, f"{length} tokens", Change(longest=length))
    if "position_ids" in forwards.argument_names:
        yield from _positions(forwards)
    if all(row.routes is not None for row in forwards.rows):
        yield Hypothesis(Cause.ROUTES, "", Change(replays_routes=True))


def _stale_prompts(forwards: Forwards, name: str, weights: Weights) -> Iterator[Hypothesis]:
    # The last token of a prompt is always computed: its logits are needed.
    lengths = [len(row.prompt_ids) - 1 for row in forwards.rows]
    # Prompts have lengths of their own; the shortest bounds what all of them begin with.
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


def _prompts(forwards: Forwards, tokenizers: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Yield texts that were tokenised or padded otherwise."""
    tokenizers = {name: text_tokenizer(own) for name, own in tokenizers.items()}
    tokenizer, vocab_size = tokenizers[""], hf_compat.vocab_size(forwards.inner)
    own = [list(row.prompt_ids) for row in forwards.rows]
    completions = [list(row.completion_ids) for row in forwards.rows]

    def read(
        cause: Cause, prompts: Iterable[list[int]], detail: str = "", sampled: Any = completions
    ) -> Iterator[Hypothesis]:
        """Yield the cause, if the model knows every id, and each sampled token has one."""
        rows = [
            row._replace(prompt_ids=ids or row.prompt_ids, completion_ids=tokens)
            for row, ids, tokens in zip(forwards.rows, prompts, sampled, strict=True)
            if len(tokens) == len(row.completion_ids) and max([*ids, *tokens]) < vocab_size
        ]
        if len(rows) == len(own):
            yield Hypothesis(cause, detail, Change(rows=rows))

    config = forwards.inner.config.get_text_config()
    bos, pad = (
        getattr(config, name, None) if tokenizer is None else getattr(tokenizer, name)
        for name in ("bos_token_id", "pad_token_id")
    )
    if isinstance(bos, int):
        yield from read(Cause.BOS_TWICE, ([bos, *prompt] for prompt in own))
        yield from read(Cause.BOS_MISSING, (ids[ids[:-1][:1] == [bos] :] for ids in own))
    if tokenizer is not None:
        special = {*tokenizer.all_special_ids}
        kept = ([token for token in prompt if token not in special] for prompt in own)
        yield from read(Cause.SPECIAL_TOKENS_DROPPED, kept)
        texts, answers = ([*map(tokenizer.decode, ids)] for ids in (own, completions))
        for (name, other), adds in product(tokenizers.items(), (False, True)):
            cause = Cause.OTHER_TOKENIZER if name else Cause.RETOKENISED
            detail = ", ".join(filter(None, (name, "special tokens added" * adds)))
            again = other(text=texts, add_special_tokens=adds)["input_ids"]
            yield from read(cause, again, detail)
            if name:
                # The engine sent its completions as text.
                sampled = other(text=answers, add_special_tokens=False)["input_ids"]
                yield from read(cause, again, f"{detail}, completions too", sampled)
        if getattr(tokenizer, "chat_template", None):
            chats = [[{"role": "user", "content": text}] for text in texts]
            # A template may refuse a chat of one message of the user.
            with suppress(Exception):
                again = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
                yield from read(Cause.TEMPLATE_TWICE, again["input_ids"])
    if isinstance(pad, int):
        longest = max(map(len, own))
        yield from read(Cause.PADDING_ATTENDED, ([pad] * (longest - len(p)) + p for p in own))


def _images(forwards: Forwards) -> Iterator[Hypothesis]:
    """Yield images that no forward read, and those of other prompts."""
    own = [(list(row.prompt_ids), row.images and row.images.images) for row in forwards.rows]

    def read(cause: Cause, detail: str, prompts: Iterable[tuple[list[int], Any]]) -> Hypothesis:
        ids, images = zip(*prompts, strict=True)
        rows = [row._replace(prompt_ids=p) for row, p in zip(forwards.rows, ids, strict=True)]
        return Hypothesis(cause, detail, Change(rows=with_images(forwards.inner, rows, images)))

    def left(ids: list[int], images: PromptImages | None, num_kept: int) -> list[int]:
        out = {t for i in (images.images if images else ()) for t in i.tokens[num_kept:]}
        return [token for t, token in enumerate(ids) if t not in out] or ids

    for num_kept, detail in ((sys.maxsize, ""), (1, "a token each"), (0, "nor their tokens")):
        yield read(Cause.IMAGES_IGNORED, detail, ((left(*x, num_kept), None) for x in own))

    def exchanged(ids: list[int], images: PromptImages, step: int) -> tuple[list[int], Any]:
        alike = {x.digest: (x, p) for p, x in own if x and len(x.images) == len(images.images)}
        place = ([*alike].index(images.digest) + step) % len(alike)
        return images.with_images_of(ids, *[*alike.values()][place])

    N = len({images.digest for _, images in own if images})
    for step in sorted(range(1, N), key=lambda step: min(step, N - step))[:MAX_STEPS]:
        others = (exchanged(ids, x, step) if x else (ids, x) for ids, x in own)
        yield read(Cause.IMAGES_EXCHANGED, f"by {step} of {N}", others)


def _positions(forwards: Forwards) -> Iterator[Hypothesis]:
    """Yield positions that are counted otherwise."""
    lengths = [len(row.prompt_ids) for row in forwards.rows]
    longest = max(lengths)
    tried = {f"completions by {by:+d}": [(0, by)] * len(lengths) for by in OFFSETS}
    tried |= {f"all by {by:+d}": [(by, by)] * len(lengths) for by in OFFSETS if by > 0}
    tried["padding counted"] = [(longest - length, longest - length) for length in lengths]
    for detail, offsets in tried.items():
        rows = []
        for row, both in zip(forwards.rows, offsets, strict=True):
            plain = RowImages(None, torch.arange(row.num_tokens, device=forwards.device)[None])
            images, positions_AT = row.images or plain
            sizes = torch.tensor([len(row.prompt_ids), len(row.completion_ids)])
            added_T = torch.tensor(both).repeat_interleave(sizes).to(forwards.device)
            rows.append(row._replace(images=RowImages(images, positions_AT + added_T)))
        yield Hypothesis(Cause.POSITIONS, detail, Change(rows=rows))


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
