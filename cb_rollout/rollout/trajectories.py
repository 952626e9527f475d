"""From an agent's turns to token-exact training samples.

Each turn is what a server answered: the prompt's token ids as the model got them, and the sampled
tokens with their log-probabilities and policy versions. Where a turn's prompt begins with all of
the turns before it, they are one sample. Where it does not (a template that rewrites history, a
client that edits it, text that was tokenized anew in another way) that is drift: a new sample
begins, in which the rewritten history is context and is not trained on. Loads no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.errors import InvalidRequestError


@dataclass(slots=True)
class Sample:
    """One sequence to train on; all lists are as long as `token_ids`."""

    token_ids: list[int] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    """True where the policy chose the token; False for prompts, tools' and environment's words."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithms of the chosen tokens; 0 elsewhere."""
    policy_versions: list[int] = field(default_factory=list)
    """Which policy chose each token; -1 elsewhere."""

    def _extend(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the policy did not choose."""
        self.token_ids += token_ids
        self.is_sampled += [False] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)
        self.policy_versions += [-1] * len(token_ids)


@dataclass(slots=True)
class Trajectory:
    """One conversation, turn by turn."""

    samples: list[Sample] = field(default_factory=list)
    """One, unless history was rewritten."""

    @property
    def num_drifts(self) -> int:
        """How often history was rewritten."""
        return max(0, len(self.samples) - 1)

    def add_turn(
        self,
        prompt_ids: Sequence[int],
        generated_tokens: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[Sequence[int]],
    ) -> bool:
        """Add one answer of the model.

        Args:
            prompt_ids: everything the model was given.
            generated_tokens: everything it sampled.
            logprobs: one for each of them.
            policy_versions: runs of `(policy_version, num_tokens)`.

        Returns:
            Whether it goes on from the turn before, token by token; True for the first.

        Raises:
            InvalidRequestError: the lists do not belong together.
        """
        versions = [version for version, count in policy_versions for _ in range(count)]
        if not len(generated_tokens) == len(logprobs) == len(versions):
            raise InvalidRequestError(
                f"{len(generated_tokens)} tokens, {len(logprobs)} log-probabilities and "
                f"{len(versions)} policy versions do not belong together; pass those of one answer."
            )
        known = self.samples[-1].token_ids if self.samples else []
        goes_on = list(prompt_ids[: len(known)]) == known
        if not self.samples or not goes_on:
            self.samples.append(Sample())
        sample = self.samples[-1]
        sample._extend(prompt_ids[len(sample.token_ids) :])
        sample.token_ids += generated_tokens
        sample.is_sampled += [True] * len(generated_tokens)
        sample.logprobs += logprobs
        sample.policy_versions += versions
        return goes_on

    def add_response(self, response: Any) -> bool:
        """Add the first choice of a chat completion, as a client got it.

        Args:
            response: of a request with `logprobs` and `return_token_ids`; an OpenAI client's
                object, or the JSON itself.

        Returns:
            As `add_turn`.
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
