"""A row's prompt as the model gets it: with the system message, through the chat template."""

from collections.abc import Sequence
from typing import Any

from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.rollout.prompts import encoded
from cb_rollout.tools.dataset.rows import Row, Survey


class PromptEncoder:
    """Turns rows into token ids."""

    def __init__(self, tokenizer: Any, *, system_prompt: str | None, chat: bool) -> None:
        """Keep what prompts are made with.

        Args:
            tokenizer: a transformers tokenizer.
            system_prompt: a system message before each chat; None: none.
            chat: make each prompt that is text a chat of one user message.
        """
        self._tokenizer, self._system_prompt, self._chat = tokenizer, system_prompt, chat

    def refuse_what_cannot_be_encoded(self, survey: Survey) -> None:
        """Raise `ConfigurationError` where a kind of prompt does not suit tokenizer or options."""
        if self._system_prompt is not None and survey.first_text and not self._chat:
            raise ConfigurationError(
                f"{survey.first_text} is text, which cannot follow a system prompt; set chat to "
                "make each text a chat, or leave system_prompt out."
            )
        first_chat = survey.first_chat or (survey.first_text if self._chat else None)
        if first_chat and getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigurationError(
                f"{first_chat} is a chat, and the tokenizer has no chat template; give text as "
                "prompt, or a model with a template."
            )

    def token_ids(self, row: Row) -> Sequence[int]:
        """What a row's prompt is to the model.

        Raises:
            InvalidRequestError: the chat template does not take it.
        """
        prompt: Any = row.prompt
        if self._chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if self._system_prompt is not None and (row.is_chat or self._chat):
            if prompt[0]["role"] == "system":
                raise InvalidRequestError(
                    "the chat has a system message of its own; take it out, or leave "
                    "system_prompt out."
                )
            prompt = [{"role": "system", "content": self._system_prompt}, *prompt]
        return encoded([prompt], self._tokenizer)[0]
