"""Build token-exact training samples from an agent's turns.

A turn is a server's answer. A turn whose prompt begins with all tokens of a sample extends it. Any
other turn is a drift: its template or client rewrote the history, the agent tries again from an
earlier turn, or the text was tokenized differently. It begins a new sample, with its prompt as
context that is not trained on. Called by any one thread; loads no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.errors import InvalidRequestError


@dataclass(slots=True)
class Sample:
    """One training sequence; all lists are as long as `token_ids`."""

    token_ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    """True for sampled tokens; False for prompts and for text of tools and the environment."""
    logprobs: list[float] = field(default_factory=list)
    """Natural log-probabilities of the sampled tokens; 0 elsewhere."""
    policy_versions: list[int] = field(default_factory=list)
    """The policy version that sampled each token; -1 elsewhere."""


@dataclass(slots=True)
class Trajectory:
    """One conversation, built turn by turn."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def num_drifts(self) -> int:
        """Return the number of turns that began a new sample."""
        return max(0, len(self.samples) - 1)

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        generated_tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[Sequence[int]],
    ) -> bool:
        """Add one answer: all token ids of its prompt, and the fields of a `GenerationOutput`.

        Returns:
            True if the prompt begins with all tokens of a sample, the longest of which is extended,
            and for the first turn.

        Raises:
            InvalidRequestError: the lists are of different lengths.
        """
        versions = [version for version, count in policy_versions for _ in range(count)]
        if not len(generated_tokens) == len(logprobs) == len(versions):
            raise InvalidRequestError(
                f"{len(generated_tokens)} tokens, {len(logprobs)} log-probabilities and "
                f"{len(versions)} policy versions do not belong together; pass those of one answer."
            )
        prompt_ids = list(prompt_ids)
        begun = [s for s in self.samples if prompt_ids[: len(s.token_ids)] == s.token_ids]
        is_continued = bool(begun) or not self.samples
        sample = max(begun, key=lambda s: len(s.token_ids), default=None)
        if sample is None:
            sample = Sample()
            self.samples.append(sample)
        context = prompt_ids[len(sample.token_ids) :]
        sample.token_ids += [*context, *generated_tokens]
        sample.is_sampled += [False] * len(context) + [True] * len(generated_tokens)
        sample.logprobs += [0.0] * len(context) + [*logprobs]
        sample.policy_versions += [-1] * len(context) + versions
        return is_continued

    def add_response(self, response: Any) -> bool:
        """Add the first choice of a chat completion, as `add_turn` does.

        `response` is an OpenAI client's object or the parsed JSON. Raises `InvalidRequestError`
        where it lacks token ids or log-probabilities.
        """
        body: Mapping[str, Any] = response if isinstance(response, dict) else response.model_dump()
        choice = body["choices"][0]
        logprobs = choice.get("logprobs")
        if "prompt_token_ids" not in body or "token_ids" not in choice or logprobs is None:
            raise InvalidRequestError(
                "the response holds no token ids or log-probabilities; ask for them with "
                "logprobs=True, extra_body={'return_token_ids': True}."
            )
        return self.add_turn(
            body["prompt_token_ids"],
            choice["token_ids"],
            [entry["logprob"] for entry in logprobs["content"]],
            choice["policy_versions"],
        )
