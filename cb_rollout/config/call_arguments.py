"""Suggest our name for an argument of another library.

Loads no torch.
"""

import dataclasses
from collections.abc import Collection, Iterable

from cb_rollout.config.checks import require_known
from cb_rollout.config.sampling import SYNONYMS, SamplingParams
from cb_rollout.errors import RolloutError

_PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}

_TOKENIZER = "give tokenizer= to the RolloutGenerator or ContinuousBatchingManager"
_NO_PADDING = "leave it out: sequences are lists of token ids without padding"

# What to write in place of an argument, by its name.
_INSTEAD = {
    "stream": "the name is streaming, which a manager's add_request takes",
    "streaming": "add the request to a manager, whose add_request takes streaming=True",
    "streamer": "add the request to a manager with streaming=True, and read request_id_iter()",
    "prompt": "the name is inputs, or input_ids of add_request",
    "prompts": "the name is inputs",
    "prompt_token_ids": "the name is inputs, or input_ids of add_request",
    "input_ids": "the name is inputs",
    "tokenizer": _TOKENIZER,
    "processing_class": _TOKENIZER,
    "attention_mask": _NO_PADDING,
    "padding": _NO_PADDING,
    "generation_config": (
        "give it to the ContinuousBatchingManager, or pass sampling_params=SamplingParams(...)"
    ),
    "continuous_batching_config": "give it to the ContinuousBatchingManager",
    "config": "the name is continuous_batching_config",
    "logits_processor": "pass SamplingParams(logits_processors=[...])",
    "stopping_criteria": "pass SamplingParams(stop=..., stop_token_ids=...)",
    "num_return_sequences": "add the prompt as often, or call generate_batch, which takes it",
    "request_id": "generate_batch makes the ids; a manager's add_request takes one",
    "use_cache": "leave it out: keys are always cached",
}


def require_arguments(
    given: Iterable[str], known: Collection[str], call: str, error: type[RolloutError]
) -> None:
    """Raise `error` for an unknown argument, and say what to write instead.

    Args:
        given: names of the passed arguments.
        known: names that the call accepts.
        call: name of the call, for the message.
        error: class of the error to raise.
    """
    complaint = f"{call} has no argument"
    for name in given:
        if name in known:
            continue
        if name in _INSTEAD:
            raise error(f"{complaint} {name!r}; {_INSTEAD[name]}.")
        if name in _PARAMETERS:
            advice = f"pass sampling_params=SamplingParams({name}=...)"
            raise error(f"{complaint} {name!r}; {advice}.")
        require_known([name], known, complaint, error, SYNONYMS)
