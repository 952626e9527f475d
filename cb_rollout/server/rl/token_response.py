"""Answers of `/inference/v1/generate`, whole and as streamed chunks.

Tokens are ids everywhere; the text is the client's to decode. Called on the server's asyncio
thread.
"""

import time
import uuid
from typing import Any

from cb_rollout.server.responses import finish_reason, ids
from cb_rollout.server.rl.bodies import TokenRequest
from cb_rollout.types import GenerationOutput


class TokenResponseBuilder:
    """Build the response of one request.

    Args:
        model_name: the served model.
        body: the request.
        client_id: the client's own name of it; None: one is made.
    """

    def __init__(self, model_name: str, body: TokenRequest, client_id: str | None) -> None:
        self._body = body
        self._with_logprobs = body.sampling_params.logprobs is not None
        options = body.stream_options
        self._with_usage = options is not None and options.include_usage
        self._prompt = {"prompt_token_ids": body.token_ids if body.return_token_ids else None}
        self._heading = {
            "request_id": client_id or uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model_name,
            "output_mode": "tokens",
        }
        self._num_sent: dict[int, int] = {}

    def whole(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        """Return the response to a request whose sequences have all ended."""
        choices = [self._choice(index, output, 0) for index, output in enumerate(outputs)]
        usage = self._usage(sum(len(output.generated_tokens) for output in outputs))
        return {**self._heading, **self._prompt, "choices": choices, "usage": usage}

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk that opens a stream, where it has something to say."""
        if not self._body.return_token_ids:
            return []
        return [{**self._heading, **self._prompt, "choices": []}]

    def chunks(self, index: int, output: GenerationOutput) -> list[dict[str, Any]]:
        """Return the chunk for a sequence's newest state."""
        start = self._num_sent.get(index, 0)
        self._num_sent[index] = len(output.generated_tokens)
        if start == len(output.generated_tokens) and not output.is_finished():
            return []
        return [{**self._heading, "choices": [self._choice(index, output, start)]}]

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunk that closes a stream, with its usage if asked for."""
        if not self._with_usage:
            return []
        return [
            {**self._heading, "choices": [], "usage": self._usage(sum(self._num_sent.values()))}
        ]

    def _choice(self, index: int, output: GenerationOutput, start: int) -> dict[str, Any]:
        return {
            "index": index,
            "finish_reason": finish_reason(output),
            "logprobs": self._logprobs(output, start) if self._with_logprobs else None,
            **ids(output, start),
        }

    def _logprobs(self, output: GenerationOutput, start: int) -> dict[str, Any]:
        content = []
        for at in range(start, len(output.generated_tokens)):
            top = output.top_logprobs[at] if output.top_logprobs is not None else []
            entry = _entry(output.generated_tokens[at], output.logprobs[at])
            content.append({**entry, "top_logprobs": [_entry(*pair) for pair in top]})
        return {"content": content}

    def _usage(self, num_completion_tokens: int) -> dict[str, int]:
        num_prompt_tokens = len(self._body.token_ids)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt_tokens + num_completion_tokens,
        }


def _entry(token_id: int, logprob: float) -> dict[str, Any]:
    # TRL 1.16 and renderers 0.1.12 read `token`; vLLM 0.32 writes `token_id`.
    return {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob}
