"""Encode prompts (token ids, texts, chats) as token ids.

Owns the check of each prompt's type, whose error names the right type. Called by any thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

from cb_rollout.compat.multimodal import is_processor
from cb_rollout.engine.images import processor
from cb_rollout.engine.images.processor import ImagePrompt
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text

# Token ids, text, a chat, or `{"prompt": one of these, "images": [...]}`.
Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]] | Mapping[str, Any]

# A prompt in the form that an engine takes.
Encoded = Sequence[int] | ImagePrompt


def require_tokenizer(tokenizer: Any) -> None:
    """Raise `ConfigurationError` unless `tokenizer` is None or callable."""
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigurationError(
            f"tokenizer is a {type(tokenizer).__name__}; pass the object that "
            "AutoTokenizer.from_pretrained(name) or AutoProcessor.from_pretrained(name) returns."
        )


def encoded(
    prompts: Iterable[Prompt], tokenizer: Any, *, add_generation_prompt: bool = True
) -> list[Encoded]:
    """Return every prompt as engine input, or raise the first `InvalidRequestError`.

    `add_generation_prompt`: end chats with the template's start of an answer.
    """
    results: list[Any] = encoded_or_refused(
        prompts, tokenizer, add_generation_prompt=add_generation_prompt
    )
    for result in results:
        if isinstance(result, InvalidRequestError):
            raise result
    return results


def encoded_or_refused(
    prompts: Iterable[Prompt], tokenizer: Any, *, add_generation_prompt: bool = True
) -> list[Encoded | InvalidRequestError]:
    """Return every prompt as engine input, or the error that refuses it.

    Texts and chats need a tokenizer. Image parts and `{"prompt": ..., "images": [...]}` need a
    processor; each image is a PIL image, a path or an array. If neighbouring prompts are the same
    object, they are encoded once. `add_generation_prompt` ends chats with the template's start of
    an answer. Raises `InvalidRequestError` if `prompts` is not a list of prompts.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"inputs is a {type(prompts).__name__}; pass a list of prompts, such as [text], or "
            "tokenizer(texts)['input_ids'] without padding."
        )
    results: list[Encoded | InvalidRequestError] = []
    previous = None
    for index, prompt in enumerate(prompts):
        if results and prompt is previous:
            results.append(results[-1])
            continue
        previous = prompt
        try:
            results.append(_encoded(prompt, index, tokenizer, add_generation_prompt))
        except InvalidRequestError as error:
            results.append(error)
    return results


class Padding(NamedTuple):
    """The token that a tokenizer pads with."""

    token_id: int
    is_text: bool
    """True if prompts may contain this token as text, because it also begins or ends sequences."""


class SpecialTokens(NamedTuple):
    """Special token ids of a config; None: the config does not name the token."""

    pad_token_id: int | None
    bos_token_id: Any
    eos_token_id: Any
    """One id, or several."""


def special_tokens_of(config: Any) -> SpecialTokens:
    """Return the special tokens of a config, without the config."""
    return SpecialTokens(*(getattr(config, name, None) for name in SpecialTokens._fields))


def padding_of(*holders: Any) -> Padding | None:
    """Return the padding from the first config or tokenizer that names it; None: none does."""
    named = [getattr(holder, "pad_token_id", None) for holder in holders]
    padding_id = next((value for value in named if isinstance(value, int)), None)
    if padding_id is None:
        return None
    is_text = False
    for holder in holders:
        for name in ("bos_token_id", "eos_token_id"):
            ids = getattr(holder, name, None)
            several = ids if isinstance(ids, list | tuple) else [ids]
            is_text = is_text or padding_id in several
    return Padding(padding_id, is_text)


def refuse_padding(prompts: Any, padding: Padding | None) -> None:
    """Raise `InvalidRequestError` for rows of token ids that were padded to one length.

    Rows of equal length, of a matrix or a list of lists, were padded if some begin or end with the
    padding token and others do not, or if all begin or end with at least two. In a list, a single
    token at a border may be text if fewer than half of the rows have it, or if `is_text`. With
    `is_text`, all rows may begin or end with the token. `padding=None`: nothing names the token.
    """
    is_matrix = getattr(prompts, "ndim", 0) == 2
    rows = _rows_of_one_length(prompts)
    if padding is None or not rows:
        return
    kind = "matrix" if is_matrix else "list"
    shape = (len(rows), len(rows[0]))
    for border, step in (("begin", 1), ("end", -1)):
        runs = [_run(row[::step], padding.token_id) for row in rows]
        num_padded = sum(run > 0 for run in runs)
        # In a list of made-up ids, some rows begin or end with the id of padding by chance.
        is_rare = num_padded < len(rows) / 2
        may_be_text = not is_matrix and (padding.is_text or is_rare)
        least = 2 if may_be_text else 1
        is_mixed = 0 < num_padded < len(rows) and max(runs) >= least
        is_padded_to_a_length = not padding.is_text and min(runs) >= 2
        if is_mixed or is_padded_to_a_length:
            raise InvalidRequestError(
                f"inputs is a {kind} of shape {shape}, and {num_padded} of its rows {border} with "
                f"{padding.token_id}, the padding token, which the model would read as text; pass "
                "tokenizer(texts)['input_ids'], made without padding= and return_tensors=."
            )


def _rows_of_one_length(prompts: Any) -> list[Any]:
    """Return the rows of a matrix, or of a list of token-id sequences; empty: there are none."""
    if getattr(prompts, "ndim", 0) == 2:
        return prompts.tolist()
    if not isinstance(prompts, list | tuple):
        return []
    rows = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in prompts]
    if not all(isinstance(row, list | tuple) and row for row in rows):
        return []
    return rows if len(set(map(len, rows))) == 1 else []


def _run(row: Sequence[Any], token_id: int) -> int:
    """Return how many times a row begins with a token, if another token follows."""
    for place, token in enumerate(row):
        if token != token_id:
            return place
    return 0


def _encoded(prompt: Any, index: int, tokenizer: Any, add_generation_prompt: bool) -> Any:
    if isinstance(prompt, Mapping) and "images" in prompt:
        prompt = processor.encoded_row(
            prompt, tokenizer, index, add_generation_prompt=add_generation_prompt
        )
        if isinstance(prompt, ImagePrompt):
            return prompt
    _require_prompt(prompt, index)
    is_text = isinstance(prompt, str)
    if not (is_text or processor.is_chat(prompt)):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError(
            f"input {index} is {'text' if is_text else 'a chat'}; pass token ids, or use a "
            "RolloutGenerator with tokenizer=."
        )
    if not is_text and getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            f"input {index} is a chat, but the tokenizer has no chat template; set "
            "tokenizer.chat_template, or pass text."
        )
    chat: Any = prompt
    if not is_text and processor.has_image_parts(chat):
        return processor.encoded_chat(
            chat, tokenizer, index, add_generation_prompt=add_generation_prompt
        )
    refusal, advice = "the tokenizer does not take this text", "is it valid Unicode?"
    if not is_text:
        refusal = "the tokenizer's chat template does not take this chat"
        advice = "change its messages, or the template."
    try:
        if is_text:
            ids = tokenizer(text=prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                prompt,
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=True,
            )["input_ids"]
        # A processor returns a batch of one.
        return ids[0] if is_processor(tokenizer) else ids
    except processor.ENCODING_FAULTS as error:
        message = f"input {index}: {refusal} ({error_text(error)}); {advice}"
        raise InvalidRequestError(message) from error


def _require_prompt(prompt: Any, index: int) -> None:
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        raise InvalidRequestError(
            f"input {index} is a tokenizer's {type(prompt).__name__} of "
            f"{', '.join(map(str, prompt))}; pass its ['input_ids'], without padding."
        )
    if isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"input {index} is a dict of {', '.join(map(str, prompt))}; a chat is a list of "
            "messages, so pass one chat as [[message, ...]], and a data set's row as row['prompt']."
        )
    if isinstance(prompt, Number) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidRequestError(
            f"input {index} is a single number; pass a list of prompts, such as [[5, 6, 7]] for "
            "one prompt."
        )
    if isinstance(prompt, set | frozenset):
        raise InvalidRequestError(f"input {index} is a set, which has no order; pass a list.")
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequestError(f"input {index} is bytes; decode it to text, or pass token ids.")


def one_per_input(name: str, value: Any, num_inputs: int) -> list[Any]:
    """Return a list with a setting for each input, which `value` may repeat for all."""
    # A text is one value, which the setting's own check refuses.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != num_inputs:
            raise InvalidRequestError(
                f"{name} has {len(value)} entries for {num_inputs} inputs; pass a single value, or "
                "one per input."
            )
        return list(value)
    return [value] * num_inputs
