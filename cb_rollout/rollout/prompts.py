"""Encode prompts (token ids, texts, chats) as token ids.

Owns the check of each prompt's type, with an error that names the right one. Called by any thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

from cb_rollout.compat.multimodal import is_processor
from cb_rollout.engine.images import processor
from cb_rollout.engine.images.processor import ImagePrompt
from cb_rollout.errors import ConfigurationError, InvalidRequestError, error_text

# Token ids, text, a chat, or `{"prompt": one of these, "images": [...]}`.
Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]] | Mapping[str, Any]

# What an engine takes.
Encoded = Sequence[int] | ImagePrompt


def require_tokenizer(tokenizer: Any) -> None:
    """Raise `ConfigurationError` unless `tokenizer` is None or callable."""
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigurationError(
            f"tokenizer is a {type(tokenizer).__name__}; pass the tokenizer itself, as "
            "AutoTokenizer.from_pretrained(name) or AutoProcessor.from_pretrained(name) makes it."
        )


def encoded(prompts: Iterable[Prompt], tokenizer: Any) -> list[Encoded]:
    """Return every prompt as an engine takes it, or raise the first `InvalidRequestError`."""
    results: list[Any] = encoded_or_refused(prompts, tokenizer)
    for result in results:
        if isinstance(result, InvalidRequestError):
            raise result
    return results


def encoded_or_refused(
    prompts: Iterable[Prompt], tokenizer: Any
) -> list[Encoded | InvalidRequestError]:
    """Return every prompt as an engine takes it, or the error that says why it is refused.

    Texts and chats need a tokenizer; image parts and `{"prompt": ..., "images": [...]}` a
    processor, and a PIL image, a path or an array each. A prompt that is the same object as the one
    before it is encoded once. Raises `InvalidRequestError` if `prompts` is no list of prompts.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"inputs is a {type(prompts).__name__}; pass a list of prompts, as [text] or "
            "tokenizer(texts)['input_ids']."
        )
    results: list[Encoded | InvalidRequestError] = []
    previous = None
    for index, prompt in enumerate(prompts):
        if results and prompt is previous:
            results.append(results[-1])
            continue
        previous = prompt
        try:
            results.append(_encoded(prompt, index, tokenizer))
        except InvalidRequestError as error:
            results.append(error)
    return results


def _encoded(prompt: Any, index: int, tokenizer: Any) -> Any:
    if isinstance(prompt, Mapping) and "images" in prompt:
        prompt = processor.encoded_row(prompt, tokenizer, index)
        if isinstance(prompt, ImagePrompt):
            return prompt
    _require_prompt(prompt, index)
    is_text = isinstance(prompt, str)
    if not (is_text or processor.is_chat(prompt)):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError(
            f"input {index} is {'text' if is_text else 'a chat'}; pass token ids, or make a "
            "RolloutGenerator with tokenizer=."
        )
    if not is_text and getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            f"input {index} is a chat, but the tokenizer has no chat template; set "
            "tokenizer.chat_template, or pass text."
        )
    chat: Any = prompt
    if not is_text and processor.has_image_parts(chat):
        return processor.encoded_chat(chat, tokenizer, index)
    refusal, advice = "the tokenizer does not take this text", "is it valid Unicode?"
    if not is_text:
        refusal = "the tokenizer's chat template does not take this chat"
        advice = "change its messages, or the template."
    try:
        if is_text:
            ids = tokenizer(text=prompt)["input_ids"]
        else:
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        # A processor returns a batch of one.
        return ids[0] if is_processor(tokenizer) else ids
    except processor.ENCODING_FAULTS as error:
        message = f"input {index}: {refusal} ({error_text(error)}); {advice}"
        raise InvalidRequestError(message) from error


def _require_prompt(prompt: Any, index: int) -> None:
    if isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f"input {index} is a dict of {', '.join(map(str, prompt))}; a chat is a list of "
            "messages, so one chat is [[message, ...]], and of a row pass its prompt."
        )
    if isinstance(prompt, Number) or getattr(prompt, "ndim", 1) == 0:
        raise InvalidRequestError(
            f"input {index} is a single number; pass a list of prompts, so one prompt is "
            "[[5, 6, 7]]."
        )
    if isinstance(prompt, set | frozenset):
        raise InvalidRequestError(f"input {index} is a set, which has no order; pass a list.")
    if isinstance(prompt, bytes | bytearray):
        raise InvalidRequestError(f"input {index} is bytes; decode it to text, or pass token ids.")


def one_per_input(name: str, value: Any, num_inputs: int) -> list[Any]:
    """Return a list with a setting for each input, which `value` may repeat for all."""
    # A text is one value, of a type that its own check refuses.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if len(value) != num_inputs:
            raise InvalidRequestError(
                f"{name} has {len(value)} entries for {num_inputs} inputs; give one, or one each."
            )
        return list(value)
    return [value] * num_inputs
