"""Answers of `/v1/completions`."""

from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.server.answers import Answer
from cb_rollout.server.policy import Policy
from cb_rollout.server.schemas import CompletionRequest
from cb_rollout.types import GenerationOutput


class CompletionAnswer(Answer):
    """Texts that go on from prompts."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self,
        policy: Policy,
        body: CompletionRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        """See `Answer`."""
        super().__init__(policy, body, prompts, params)
        self._with_logprobs = body.logprobs is not None
        self._num_characters: dict[int, int] = {}

    def choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """One whole choice."""
        logprobs = None
        if self._with_logprobs:
            logprobs = self._policy.tokens.completion_logprobs(output)
        prompt = {"prompt_token_ids": self.prompt_of(index)} if self._with_ids else {}
        return {
            "text": self.text(output),
            "finish_reason": output.finish_reason,
            "logprobs": logprobs,
            **self.ids(output),
            **prompt,
        }

    def delta(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """What a stream tells of one sequence's newest state."""
        text, start = self.news(index, output)
        has_tokens = self._with_ids or self._with_logprobs
        if not text and not has_tokens and not output.is_finished():
            return []
        logprobs = None
        if self._with_logprobs:
            num_before = self._num_characters.get(index, 0)
            logprobs = self._policy.tokens.completion_logprobs(output, start, num_before)
            self._num_characters[index] = num_before + sum(map(len, logprobs["tokens"]))
        choice = {
            "text": text,
            "finish_reason": output.finish_reason,
            "logprobs": logprobs,
            **self.ids(output, start),
        }
        if self._with_ids and start == 0:
            choice["prompt_token_ids"] = self.prompt_of(index)
        return [self.chunk(index, choice)]
