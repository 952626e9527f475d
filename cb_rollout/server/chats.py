"""Answers of `/v1/chat/completions`."""

from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.server.answers import Answer
from cb_rollout.server.policy import Policy
from cb_rollout.server.schemas import ChatRequest
from cb_rollout.types import GenerationOutput


class ChatAnswer(Answer):
    """An assistant's messages."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        policy: Policy,
        body: ChatRequest,
        prompt_text: str,
        prompt_ids: list[int],
        params: SamplingParams,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        """See `Answer`.

        Args:
            policy: what answers.
            body: what was asked.
            prompt_text: the chat through the template.
            prompt_ids: its tokens.
            params: how the answers are sampled.
            tools: that the model was told of; None: none.
        """
        super().__init__(policy, body, [prompt_ids], params)
        self._prompt_text, self._tools = prompt_text, tools
        self._with_logprobs = bool(body.logprobs)
        self._texts: dict[int, str] = {}
        self._num_said: dict[int, int] = {}

    def body(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        """The whole answer."""
        body = super().body(outputs)
        if self._with_ids:
            body["prompt_token_ids"] = self._prompts[0]
        return body

    def choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """One whole choice."""
        self._remember(output)
        message = self._message(self.text(output), output)
        return {
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else output.finish_reason,
            "logprobs": self._logprobs(output, 0),
            **self.ids(output),
        }

    def opening(self) -> list[dict[str, Any]]:
        """A chunk with the role for every choice."""
        more = {"prompt_token_ids": self._prompts[0]} if self._with_ids else {}
        delta = {"role": "assistant", "content": ""}
        return [
            self.chunk(index, {"delta": delta, "finish_reason": None, "logprobs": None}, **more)
            for index in range(self._num_choices)
        ]

    def delta(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """What a stream tells of one sequence's newest state."""
        text, start = self.news(index, output)
        is_last = output.is_finished()
        delta, reason = self._said(index, text, output)
        has_tokens = (self._with_ids or self._with_logprobs) and start < len(
            output.generated_tokens
        )
        if is_last:
            self._remember(output)
        if not delta and not has_tokens and not is_last:
            return []
        choice = {
            "delta": delta,
            "finish_reason": reason,
            "logprobs": self._logprobs(output, start),
            **self.ids(output, start),
        }
        return [self.chunk(index, choice)]

    def _said(
        self, index: int, text: str, output: GenerationOutput
    ) -> tuple[dict[str, Any], str | None]:
        """What a chunk says, and why the answer ended, if it did."""
        if not self._tools:
            return ({"content": text} if text else {}), output.finish_reason
        # Text goes out while it is surely no call; calls go out whole, at the end.
        whole = self._texts[index] = self._texts.get(index, "") + text
        num_said = self._num_said.get(index, 0)
        if not output.is_finished():
            num_certain = self._policy.tools.num_certain(whole)
            self._num_said[index] = max(num_said, num_certain)
            said = whole[num_said:num_certain]
            return ({"content": said} if said else {}), None
        message = self._message(whole, output)
        calls = message.get("tool_calls")
        if not calls:
            said = whole[num_said:]
            return ({"content": said} if said else {}), output.finish_reason
        delta: dict[str, Any] = {
            "tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]
        }
        if not num_said and message["content"]:
            delta["content"] = message["content"]
        return delta, "tool_calls"

    def _message(self, text: str, output: GenerationOutput) -> dict[str, Any]:
        if not self._tools:
            return {"role": "assistant", "content": text}
        return self._policy.tools.message(
            text, output.generated_tokens, self._prompts[0], self._tools
        )

    def _logprobs(self, output: GenerationOutput, start: int) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        return self._policy.tokens.chat_logprobs(output, start)

    def _remember(self, output: GenerationOutput) -> None:
        self._policy.remember(self._prompt_text, self._prompts[0], output.generated_tokens)
