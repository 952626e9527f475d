"""List the causes that need a forward of their own, as changes of the trainer's forward.

Decides which changes are worth a forward, for a model and the caller's arguments.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from transformers.pytorch_utils import Conv1D

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.multimodal import text_tokenizer
from cb_rollout.compat.rope import rotary_modules
from cb_rollout.engine.attention.shared_prefix import num_common
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.errors import ConfigurationError
from cb_rollout.packing.rows import PackedRow, RowImages, with_images
from cb_rollout.rollout.audit.evidence import Prediction
from cb_rollout.rollout.audit.forwards import Change, Forwards, Weights, without_adapters
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.weights.adapters import low_ranks_of

# Block sizes of vLLM, SGLang and this package, whose prefix caches find only whole blocks.
BLOCK_SIZES = (16, 32)

# Offsets of positions: off by one, and the two extra positions that OPT's embeddings begin with.
OFFSETS = (-1, 1, 2)

# Number of other prompts, nearest in order, with whose images each prompt is tested.
MAX_STEPS = 15

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


class Hypothesis(NamedTuple):
    """One cause, and its predictions."""

    cause: Cause
    detail: str
    effect: Change | Prediction
    """The forward that it implies, or the readout of existing logits."""
    num_fitted: int = 0
    """Number of parameters that were fitted to the reported numbers."""
    noise_share: float = 0.0
    """Extra noise, as a fraction of the shift of log-probabilities that it predicts."""


def hypotheses(
    forwards: Forwards, versions: Mapping[str, Weights], tokenizers: Mapping[str, Any]
) -> Iterator[Hypothesis]:
    """Yield every cause that can be tested on these sequences.

    The tokenizer named "" is the trainer's, or None.
    """
    # Before versions: a new adapter changes nothing, so its first version equals the base model.
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
    if is_text and _scales_rope_by_length(forwards.inner):
        longest = max(row.num_tokens for row in forwards.rows)
        for length in (longest, forwards.inner.config.get_text_config().max_position_embeddings):
            yield Hypothesis(Cause.ROPE, f"{length} tokens", Change(longest=length))
    if "position_ids" in forwards.argument_names:
        yield from _positions(forwards)
    if all(row.routes is not None for row in forwards.rows):
        yield Hypothesis(Cause.ROUTES, "", Change(replays_routes=True))


def _scales_rope_by_length(inner: Any) -> bool:
    for _, rope_type_of_layers in rotary_modules(inner):
        if {"longrope", "dynamic"}.intersection(rope_type_of_layers.values()):
            return True
    return False


def _stale_prompts(forwards: Forwards, name: str, weights: Weights) -> Iterator[Hypothesis]:
    """Yield hypotheses that an older version computed the keys of prompts' first tokens."""
    # The last token of a prompt is always computed: its logits are needed.
    lengths = [len(row.prompt_ids) - 1 for row in forwards.rows]
    num_shared = num_common([list(row.prompt_ids) for row in forwards.rows])
    # Number of cached tokens of each row, by the name of the part that is cached.
    tried = {f"first {num_shared} tokens": tuple(min(num_shared, length) for length in lengths)}
    for size in BLOCK_SIZES:
        tried[f"blocks of {size}"] = tuple(length // size * size for length in lengths)
    tried["whole prompts"] = tuple(lengths)
    # Equal numbers are one hypothesis, under the last of their names.
    names: dict[tuple[int, ...], str] = {}
    for cached_part, num_cached in tried.items():
        if any(num_cached):
            names[num_cached] = cached_part
    for num_cached, cached_part in names.items():
        change = Change(cached_weights=weights, num_cached=num_cached)
        yield Hypothesis(Cause.STALE_PROMPT_KEYS, f"{name}, {cached_part}", change)


def _adapters(inner: torch.nn.Module) -> Iterator[Hypothesis]:
    """Yield an adapter that is missing, exchanged, applied twice, or merged in 16 bits."""
    without = without_adapters(inner)
    if not without:
        return
    parameters = dict(inner.named_parameters())
    yield Hypothesis(Cause.NO_ADAPTER, "base model", Change(without))
    doubled = {name: 2 * parameters[name] for name in without}
    yield Hypothesis(Cause.ADAPTER_TWICE, "", Change(doubled))
    active: set[str] = set()
    adapters: set[str] = set()
    for module in inner.modules():
        layer: Any = module
        if hasattr(layer, "lora_B"):
            active.update(layer.active_adapters)
            adapters.update(layer.lora_B)
    if active:
        first_active = min(active)
        for other in sorted(adapters - active):
            exchanged = _exchanged(parameters, first_active, other)
            yield Hypothesis(Cause.OTHER_ADAPTER, other, Change(exchanged))
    with suppress(ConfigurationError):
        # Refuses adapters that are not a low-rank product, such as DoRA's.
        rounded: dict[str, torch.Tensor] = {}
        for name, weight in _merged(inner).items():
            rounded[name] = weight.bfloat16().to(weight.dtype)
        yield Hypothesis(Cause.ADAPTER_MERGED, "bfloat16", Change({**rounded, **without}))


def _exchanged(parameters: Weights, active: str, other: str) -> dict[str, torch.Tensor]:
    """Return the parameters of another adapter under the names of the active one."""
    exchanged = {}
    for name, parameter in parameters.items():
        if f".{other}." in name:
            exchanged[name.replace(f".{other}.", f".{active}.")] = parameter
    return exchanged


def _merged(inner: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the base weights with their active adapters added, by name."""
    merged: dict[str, torch.Tensor] = {}
    for name, module in inner.named_modules():
        layer: Any = module
        for low_rank in low_ranks_of(module):
            key = f"{name}.base_layer.weight"
            base: Any = merged.get(key, layer.base_layer.weight.detach())
            A = low_rank.A.detach()
            B = low_rank.B.detach()
            delta = low_rank.delta(A, B, torch.float32, split=None)
            merged[key] = (base.float() + delta).to(base.dtype)
    return merged


def _precisions(inner: Any) -> Iterator[Hypothesis]:
    """Yield the model, and its head alone, in bfloat16 if the trainer has float32."""
    if torch.is_autocast_enabled(inner.device.type):
        return
    rounded: dict[str, torch.Tensor] = {}
    for name, parameter in inner.named_parameters():
        if parameter.dtype == torch.float32:
            rounded[name] = parameter.detach().bfloat16()
    if not rounded:
        return
    yield Hypothesis(Cause.MODEL_16BIT, "bfloat16", Change(rounded), noise_share=1.0)
    if isinstance(inner.get_output_embeddings(), torch.nn.Linear):
        # Two kernels for one product agree better than two precisions.
        change = Change(head_dtype=torch.bfloat16)
        yield Hypothesis(Cause.HEAD_16BIT, "bfloat16", change, noise_share=0.25)


def _quantised(inner: Any) -> Iterator[Hypothesis]:
    """Yield linear weights in 8 bits: integers with a scale per output, floats with one scale."""
    layers = _quantisable_layers(inner)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weights = {}
        for name, layer in layers.items():
            weights[f"{name}.weight"] = _rounded_to_8_bits(layer, dtype)
        # Activations may be rounded too.
        detail = str(dtype).removeprefix("torch.")
        yield Hypothesis(Cause.QUANTISED, detail, Change(weights), noise_share=0.25)


def _quantisable_layers(inner: Any) -> dict[str, Any]:
    """Return the linear layers except the head and adapters, by name."""
    head = inner.get_output_embeddings()
    layers: dict[str, Any] = {}
    for name, module in inner.named_modules():
        is_linear = isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        if is_linear and "lora_" not in name and module.weight.is_floating_point():
            layers[name] = module
    return layers


def _rounded_to_8_bits(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a layer's weight as a quantised layer would multiply by it."""
    weight: torch.Tensor = layer.weight.detach().float()
    if dtype is torch.int8:
        largest_level = 127
        of_an_output = 0 if isinstance(layer, Conv1D) else 1
        peak = weight.abs().amax(of_an_output, keepdim=True)
    else:
        largest_level = 448
        peak = weight.abs().amax()
    levels = weight * (largest_level / peak)
    rounded = levels.round() if dtype is torch.int8 else levels.to(dtype).float()
    return (weight * rounded / levels).nan_to_num().to(layer.weight)


def _prompts(forwards: Forwards, tokenizers: Mapping[str, Any]) -> Iterator[Hypothesis]:
    """Yield texts that were tokenised or padded differently."""
    tokenizer = tokenizers[""]
    if tokenizer is not None:
        tokenizer = text_tokenizer(tokenizer)
    prompts = [list(row.prompt_ids) for row in forwards.rows]
    source = forwards.inner.config.get_text_config() if tokenizer is None else tokenizer
    bos = getattr(source, "bos_token_id", None)
    pad = getattr(source, "pad_token_id", None)
    if isinstance(bos, int):
        with_bos = [[bos, *prompt] for prompt in prompts]
        yield from _read_otherwise(forwards, Cause.BOS_TWICE, with_bos)
        without_bos: list[list[int]] = []
        for prompt in prompts:
            begins_with_bos = len(prompt) > 1 and prompt[0] == bos
            without_bos.append(prompt[1:] if begins_with_bos else prompt)
        yield from _read_otherwise(forwards, Cause.BOS_MISSING, without_bos)
    if tokenizer is not None:
        special = set(tokenizer.all_special_ids)
        without_special: list[list[int]] = []
        for prompt in prompts:
            without_special.append([token for token in prompt if token not in special])
        yield from _read_otherwise(forwards, Cause.SPECIAL_TOKENS_DROPPED, without_special)
        yield from _tokenised_again(forwards, tokenizer, tokenizers)
        yield from _in_a_template_again(forwards, tokenizer)
    if isinstance(pad, int):
        longest = max(len(prompt) for prompt in prompts)
        padded = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        yield from _read_otherwise(forwards, Cause.PADDING_ATTENDED, padded)


def _read_otherwise(
    forwards: Forwards,
    cause: Cause,
    prompts: Sequence[Sequence[int]],
    detail: str = "",
    completions: Sequence[Sequence[int]] | None = None,
) -> Iterator[Hypothesis]:
    """Yield a cause if the model knows every id, and completions keep their numbers of tokens.

    Args:
        forwards: has the sequences.
        cause: the reason for the other token ids.
        prompts: the ids that the engine read for each prompt; empty: the recorded ids.
        detail: distinguishes the hypothesis from others of the same cause.
        completions: the ids that the engine sampled for each completion; None: the recorded ids.
    """
    vocab_size = hf_compat.vocab_size(forwards.inner)
    if completions is None:
        completions = [row.completion_ids for row in forwards.rows]
    rows: list[PackedRow] = []
    for row, prompt_ids, completion_ids in zip(forwards.rows, prompts, completions, strict=True):
        if max([*prompt_ids, *completion_ids]) >= vocab_size:
            return
        if len(completion_ids) != len(row.completion_ids):
            return
        rows.append(
            row._replace(
                prompt_ids=list(prompt_ids) or row.prompt_ids, completion_ids=list(completion_ids)
            )
        )
    yield Hypothesis(cause, detail, Change(rows=rows))


def _texts(tokenizer: Any, sequences: Iterable[Sequence[int]]) -> list[str]:
    return [tokenizer.decode(list(ids)) for ids in sequences]


def _tokenised_again(
    forwards: Forwards, tokenizer: Any, tokenizers: Mapping[str, Any]
) -> Iterator[Hypothesis]:
    """Yield prompts that were sent as text; with another tokenizer, also completions."""
    prompts = _texts(tokenizer, (row.prompt_ids for row in forwards.rows))
    completions = _texts(tokenizer, (row.completion_ids for row in forwards.rows))
    for name, other in tokenizers.items():
        other = text_tokenizer(other)
        for adds_special in (False, True):
            details = [name] if name else []
            if adds_special:
                details.append("special tokens added")
            prompt_ids = other(text=prompts, add_special_tokens=adds_special)["input_ids"]
            cause = Cause.OTHER_TOKENIZER if name else Cause.RETOKENISED
            yield from _read_otherwise(forwards, cause, prompt_ids, ", ".join(details))
            if name:
                # The engine sent its completions as text.
                completion_ids = other(text=completions, add_special_tokens=False)["input_ids"]
                detail = ", ".join([*details, "completions too"])
                yield from _read_otherwise(forwards, cause, prompt_ids, detail, completion_ids)


def _in_a_template_again(forwards: Forwards, tokenizer: Any) -> Iterator[Hypothesis]:
    """Yield prompts that a chat template was applied to a second time."""
    if not getattr(tokenizer, "chat_template", None):
        return
    chats = []
    for text in _texts(tokenizer, (row.prompt_ids for row in forwards.rows)):
        chats.append([{"role": "user", "content": text}])
    # A template may refuse a chat with a single user message.
    with suppress(Exception):
        again = tokenizer.apply_chat_template(chats, add_generation_prompt=True)
        yield from _read_otherwise(forwards, Cause.TEMPLATE_TWICE, again["input_ids"])


# The token ids of a prompt, and its images; None: it has none.
Prompt = tuple[list[int], PromptImages | None]


def _images(forwards: Forwards) -> Iterator[Hypothesis]:
    """Yield images that the engine did not read, and images that it read for other prompts."""
    prompts: list[Prompt] = []
    for row in forwards.rows:
        images = None if row.images is None else row.images.images
        prompts.append((list(row.prompt_ids), images))
    for num_kept, detail in ((None, ""), (1, "a token each"), (0, "nor their tokens")):
        ignored: list[Prompt] = []
        for prompt_ids, images in prompts:
            ignored.append((_with_few_image_tokens(prompt_ids, images, num_kept), None))
        yield _with_other_images(forwards, Cause.IMAGES_IGNORED, detail, ignored)
    num_different = len({images.digest for _, images in prompts if images is not None})

    def steps_away(step: int) -> int:
        return min(step, num_different - step)

    nearest_steps = sorted(range(1, num_different), key=steps_away)
    for step in nearest_steps[:MAX_STEPS]:
        exchanged = [_with_images_of_another(prompt, prompts, step) for prompt in prompts]
        detail = f"by {step} of {num_different}"
        yield _with_other_images(forwards, Cause.IMAGES_EXCHANGED, detail, exchanged)


def _with_other_images(
    forwards: Forwards, cause: Cause, detail: str, prompts: Sequence[Prompt]
) -> Hypothesis:
    """Return the hypothesis that the engine read these prompts and their images."""
    rows: list[PackedRow] = []
    images_of_rows: list[PromptImages | None] = []
    for row, (prompt_ids, images) in zip(forwards.rows, prompts, strict=True):
        rows.append(row._replace(prompt_ids=prompt_ids))
        images_of_rows.append(images)
    change = Change(rows=with_images(forwards.inner, rows, images_of_rows))
    return Hypothesis(cause, detail, change)


def _with_few_image_tokens(
    prompt_ids: list[int], images: PromptImages | None, num_kept: int | None
) -> list[int]:
    """Return a prompt with each image's first `num_kept` tokens; None: with all tokens.

    A prompt that would be empty is left as it was.
    """
    if images is None or num_kept is None:
        return prompt_ids
    left_out: set[int] = set()
    for image in images.images:
        left_out.update(image.tokens[num_kept:])
    kept = [token for index, token in enumerate(prompt_ids) if index not in left_out]
    return kept or prompt_ids


def _with_images_of_another(prompt: Prompt, prompts: Sequence[Prompt], step: int) -> Prompt:
    """Return a prompt with the images `step` places later, of prompts with as many images."""
    prompt_ids, images = prompt
    if images is None:
        return prompt
    alike: dict[bytes, tuple[PromptImages, list[int]]] = {}
    for other_ids, other in prompts:
        if other is not None and len(other.images) == len(images.images):
            alike[other.digest] = (other, other_ids)
    number = list(alike).index(images.digest)
    other, other_ids = list(alike.values())[(number + step) % len(alike)]
    return images.with_images_of(prompt_ids, other, other_ids)


def _positions(forwards: Forwards) -> Iterator[Hypothesis]:
    """Yield positions that are counted differently."""
    lengths = [len(row.prompt_ids) for row in forwards.rows]
    longest = max(lengths)
    # For each row, the numbers added to the positions of its prompt and of its completion.
    tried: dict[str, list[tuple[int, int]]] = {}
    for offset in OFFSETS:
        tried[f"completions by {offset:+d}"] = [(0, offset)] * len(lengths)
    for offset in OFFSETS:
        if offset > 0:
            tried[f"all by {offset:+d}"] = [(offset, offset)] * len(lengths)
    tried["padding counted"] = [(longest - length, longest - length) for length in lengths]
    for detail, offsets in tried.items():
        rows = []
        for row, (of_prompt, of_completion) in zip(forwards.rows, offsets, strict=True):
            rows.append(_moved(row, of_prompt, of_completion, forwards.device))
        yield Hypothesis(Cause.POSITIONS, detail, Change(rows=rows))


def _moved(row: PackedRow, of_prompt: int, of_completion: int, device: torch.device) -> PackedRow:
    """Return a row with numbers added to the positions of its prompt and its completion."""
    if row.images is None:
        images = None
        positions_AT = torch.arange(row.num_tokens, device=device)[None]
    else:
        images, positions_AT = row.images
    added_T = torch.full((row.num_tokens,), of_completion, device=device)
    added_T[: len(row.prompt_ids)] = of_prompt
    return row._replace(images=RowImages(images, positions_AT + added_T))


def layer_hypotheses(versions: Mapping[str, Weights]) -> Iterator[Hypothesis]:
    """Yield each layer of each version, together with the trainer's other layers."""
    for version, weights in versions.items():
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights.items():
            match = LAYER.search(name)
            # Outside the layers: embeddings, the last norm, the head.
            layer = name if match is None else f"layer {match[1]}"
            layers.setdefault(layer, {})[name] = tensor
        for layer, tensors in layers.items():
            detail = f"{layer} of {version}"
            yield Hypothesis(Cause.STALE_LAYER, detail, Change(tensors), num_fitted=1)
