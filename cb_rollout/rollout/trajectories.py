"""Build token-exact training samples from an agent's turns.

A turn is a server's answer. If its prompt begins with all tokens of a sample, it extends that
sample. Any other turn is a drift: the template or the client rewrote the history, the agent retried
from an earlier turn, or the text was tokenized differently. A drift begins a new sample, whose
prompt is context that is not trained on. Used by one thread at a time; loads no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.config.checks import plain_token_ids
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
    """Collect the training samples of one conversation, turn by turn."""

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
            True for the first turn, and if the prompt begins with all tokens of a sample; the
            longest such sample is extended. False if history was rewritten.

        Raises:
            InvalidRequestError: the lists are of different lengths, or do not hold token ids.
        """
        versions: list[int] = []
        for version, num_tokens in policy_versions:
            versions.extend([version] * num_tokens)
        if not len(generated_tokens) == len(logprobs) == len(versions):
            raise InvalidRequestError(
                f"{len(generated_tokens)} tokens, {len(logprobs)} log-probabilities and "
                f"{len(versions)} policy versions do not belong together; pass those of one answer."
            )
        try:
            prompt_ids = plain_token_ids(prompt_ids)
            generated_tokens = plain_token_ids(generated_tokens)
        except TypeError as error:
            raise InvalidRequestError(
                f"the turn does not hold token ids ({error}); pass those of one answer."
            ) from error
        sample = self._longest_prefix_of(prompt_ids)
        is_drift = sample is None and bool(self.samples)
        if sample is None:
            sample = Sample()
            self.samples.append(sample)
        context = prompt_ids[len(sample.token_ids) :]

        sample.token_ids += context
        sample.is_sampled += [False] * len(context)
        sample.logprobs += [0.0] * len(context)
        sample.policy_versions += [-1] * len(context)

        sample.token_ids += generated_tokens
        sample.is_sampled += [True] * len(generated_tokens)
        sample.logprobs += logprobs
        sample.policy_versions += versions
        return not is_drift

    def _longest_prefix_of(self, prompt_ids: list[int]) -> Sample | None:
        """Return the longest sample whose tokens are a prefix of a prompt; None if no sample is.

        If several are equally long, it is the first.
        """
        longest = None
        for sample in self.samples:
            is_prefix = prompt_ids[: len(sample.token_ids)] == sample.token_ids
            if is_prefix and (longest is None or len(sample.token_ids) > len(longest.token_ids)):
                longest = sample
        return longest

    def add_response(self, response: Any) -> bool:
        """Add the first choice of a chat completion, as `add_turn` does.

        Args:
            response: an OpenAI client's object, or the parsed JSON.

        Raises:
            InvalidRequestError: the response has no token ids or no log-probabilities.
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
