"""Completions of an attached trainer's generator, for a `rollout_func` of one's own.

Called by the trainer, on its thread. Knows the trainer by its attributes only.
"""

from collections.abc import Callable
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trainer_rollouts import TrainerRollouts
from cb_rollout.sampling_params import SamplingParams


def make_rollout_func(
    sampling_params: SamplingParams | None = None,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for `GRPOTrainer` that samples one completion of every prompt it is given.

    To be passed to the trainer as it is, or to be called, once or for each turn, by a function of
    one's own. The trainer must be attached before it trains. TRL hands over each prompt as often
    as it wants completions of it; equal ones are computed once.

    Args:
        sampling_params: how to sample; None: as the trainer's config says.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which gives `prompt_ids`,
        `completion_ids` and `logprobs`, one list each a prompt.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rollouts = getattr(trainer, "vllm_generation", None)
        if not isinstance(rollouts, TrainerRollouts):
            raise ConfigurationError(
                "a function of make_rollout_func() generates through what is attached to the "
                "trainer, and nothing is; call cb_rollout.attach(trainer) before train()."
            )
        ids = prompts
        if prompts and not all(_are_token_ids(prompt) for prompt in prompts):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        outputs = rollouts.sample(ids, sampling_params)
        return {
            "prompt_ids": ids,
            "completion_ids": [output.generated_tokens for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }

    return rollout


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
