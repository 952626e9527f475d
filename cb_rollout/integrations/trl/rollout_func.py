"""Generate completions for a `rollout_func`, by the attached engine.

Called by the trainer, on its thread.
"""

from collections.abc import Callable
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import attached_backend


def make_rollout_func(
    sampling_params: SamplingParams | None = None,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Make a `rollout_func` for `GRPOTrainer` that samples one completion of every prompt.

    Pass it to the trainer as it is, or call it, once or for each turn, from a function of your own.
    TRL repeats each prompt for every completion it wants; equal prompts are prefilled once. The
    trainer must be attached when it trains.

    Args:
        sampling_params: None: the trainer's.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which returns
        `prompt_ids`, `completion_ids` and `logprobs`, one list for each prompt. It raises
        `ConfigurationError` where nothing is attached.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = attached_backend(trainer)
        if backend is None:
            raise ConfigurationError(
                "make_rollout_func() samples by the attached engine; call "
                "cb_rollout.attach(trainer) before train()."
            )
        ids = prompts
        if prompts and not all(_are_token_ids(prompt) for prompt in prompts):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        outputs = backend.sample(ids, sampling_params)
        return {
            "prompt_ids": ids,
            "completion_ids": [output.generated_tokens for output in outputs],
            "logprobs": [output.logprobs for output in outputs],
        }

    return rollout


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
