"""Prompts as people write them, turned into token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cb_rollout.errors import InvalidRequestError

Prompt = Sequence[int] | str | Sequence[Mapping[str, Any]]
# Token ids, text, or a chat.


def encoded(prompts: Iterable[Prompt], tokenizer: Any) -> list[Sequence[int]]:
    """Token ids of every prompt.

    Args:
        prompts: lists of token ids, which stay as they are; strings; chats, to which the
            tokenizer's chat template is applied.
        tokenizer: a transformers tokenizer; None: only token ids are allowed.

    Raises:
        InvalidRequestError: text or a chat without a tokenizer, or with one that cannot encode it.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"inputs is a {type(prompts).__name__}; pass a list of prompts, as [text] or "
            "tokenizer(texts)['input_ids']."
        )
    return [_encoded(prompt, index, tokenizer) for index, prompt in enumerate(prompts)]


def _encoded(prompt: Any, index: int, tokenizer: Any) -> Any:
    is_text = isinstance(prompt, str)
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not (is_text or is_chat):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError(
            f"input {index} is {'text' if is_text else 'a chat'}; pass token ids, or make the "
            "generator with tokenizer=."
        )
    if is_text:
        return tokenizer(prompt)["input_ids"]
    if getattr(tokenizer, "chat_template", None) is None:
        raise InvalidRequestError(
            f"input {index} is a chat, but the tokenizer has no chat template; set "
            "tokenizer.chat_template, or pass text."
        )
    return tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]


def one_per_input(name: str, value: Any, num_inputs: int) -> list[Any]:
    """A setting for every input, given as one for all or as one each."""
    if isinstance(value, Sequence):
        if len(value) != num_inputs:
            raise InvalidRequestError(
                f"{name} has {len(value)} entries for {num_inputs} inputs; give one, or one each."
            )
        return list(value)
    return [value] * num_inputs
