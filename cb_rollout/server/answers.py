"""What both endpoints answer with: ids, usage, and the tokens of a choice on request."""

import time
import uuid
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.server.errors import ApiError
from cb_rollout.server.policy import Policy
from cb_rollout.server.schemas import ChatRequest, CompletionRequest
from cb_rollout.server.text import TextStream, cut
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus


class Answer:
    """An answer as it grows; a subclass gives it its shape."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def __init__(
        self,
        policy: Policy,
        body: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        """Begin with nothing said.

        Args:
            policy: what answers.
            body: what was asked.
            prompts: token ids of each prompt; each has `n` sequences.
            params: how they are sampled.
        """
        self._policy, self._prompts, self._params = policy, prompts, params
        self._num_choices = body.n or 1
        self._with_ids = body.return_token_ids
        self._with_usage = body.stream_options is not None and body.stream_options.include_usage
        self._heading = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": policy.options.model_name,
        }
        self._streams: dict[int, TextStream] = {}
        self._num_told: dict[int, int] = {}

    def body(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        """The whole answer, of sequences that all have ended."""
        choices = [
            {"index": index, **self.choice(index, output)} for index, output in enumerate(outputs)
        ]
        return {
            **self._heading,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(sum(len(output.generated_tokens) for output in outputs)),
        }

    def choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        """One whole choice."""
        raise NotImplementedError

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def delta(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """What a stream tells of one sequence's newest state."""
        raise NotImplementedError

    def closing(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if not self._with_usage:
            return []
        usage = self._usage(sum(self._num_told.values()))
        return [{**self._heading, "object": self.chunk_kind, "choices": [], "usage": usage}]

    def chunk(self, index: int, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        """One event of a stream."""
        choices = [{"index": index, **choice}]
        return {**self._heading, "object": self.chunk_kind, "choices": choices, **more}

    def prompt_of(self, index: int) -> list[int]:
        """The prompt that a sequence goes on from."""
        return self._prompts[index // self._num_choices]

    def text(self, output: GenerationOutput) -> str:
        """A whole sequence's text, without the stop string that ended it."""
        decode, tokens = self._policy.decode, output.generated_tokens
        text, stops = decode(tokens), self._params.stop
        if not stops or output.finish_reason is not FinishReason.STOP:
            return text
        stream = TextStream(decode)
        return cut(text, len(stream.push(tokens[:-1])), stops)

    def news(self, index: int, output: GenerationOutput) -> tuple[str, int]:
        """What is new of a sequence: text that is certain, and from which token on."""
        if index not in self._streams:
            self._streams[index] = TextStream(self._policy.decode, self._params.stop)
        stream, start = self._streams[index], self._num_told.get(index, 0)
        text = stream.push(output.generated_tokens[start:])
        if output.is_finished():
            text += stream.finish(is_stopped=output.finish_reason is FinishReason.STOP)
        self._num_told[index] = len(output.generated_tokens)
        return text, start

    def ids(self, output: GenerationOutput, start: int = 0) -> dict[str, Any]:
        """Token ids and policy versions of the tokens from `start`, where they were asked for."""
        if not self._with_ids:
            return {}
        return {
            "token_ids": output.generated_tokens[start:],
            "policy_versions": _runs_from(output.policy_versions, start),
        }

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


def require_sound(output: GenerationOutput) -> None:
    """Raise 503 where a sequence failed, or was ended by someone else than its client."""
    if output.status is RequestStatus.CANCELLED:
        raise ApiError(503, "the request was cancelled by the server; send it again.")
    if output.status is RequestStatus.FAILED:
        raise ApiError(503, f"the sequence could not be generated: {output.error}")


def _runs_from(runs: list[tuple[int, int]], start: int) -> list[list[int]]:
    """Runs of `[policy_version, num_tokens]` of the tokens from `start`."""
    rest = []
    for version, count in runs:
        if count > start:
            rest.append([version, count - start])
        start = max(0, start - count)
    return rest
