"""Try a small engine with a model's own config in a child process: `try_engine`.

The model has few layers, with random weights, and the head and vocabulary sizes of the real model.
Called only by the child process of `numerics/qualification`, for `cuda_graphs/qualification.py`.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.cuda_graphs.qualification import small_model
from cb_rollout.engine.numerics.agreement import agrees, overall_noise
from cb_rollout.engine.numerics.qualification.child import CannotTryError
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import OutOfCacheMemoryError
from cb_rollout.types import GenerationOutput

# Tokens of the prompts: two share their first tokens, one has its keys cut into stretches, and one
# is short.
SHARED_TOKENS = 96
LONG_TOKENS = 700
SHORT_TOKENS = 5
NEW_TOKENS = 8

# Sampling parameters, which rows take in turns.
SAMPLED = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(ignore_eos=True),
    SamplingParams(top_k=5, ignore_eos=True),
    SamplingParams(top_p=0.8, temperature=1.3, ignore_eos=True),
    SamplingParams(min_p=0.05, ignore_eos=True),
)


def try_engine(argument: Mapping[str, Any]) -> dict[str, Any]:
    """Generate with a small model, and compare log-probabilities with its plain forward.

    Args:
        argument: "device", "dtype", "autocast_dtype" ("": none); "config": of the small model, as a
            dict; "attention": its `attn_implementation`; "settings": of `RolloutConfig`.

    Returns:
        A verdict in the form that `Subject.function` describes; "milliseconds" has a step's time.

    Raises:
        CannotTryError: this process cannot use the device, or the device has no free memory.
    """
    device = torch.device(argument["device"])
    try:
        torch.zeros(1, device=device)
    except Exception as error:
        raise CannotTryError(f"{device} cannot be had by two processes ({error})") from error
    try:
        torch.manual_seed(0)
        with device:
            model = small_model(
                argument["config"], getattr(torch, argument["dtype"]), argument["attention"]
            )
        return _tried(model.eval(), argument)
    except (torch.OutOfMemoryError, OutOfCacheMemoryError) as error:
        raise CannotTryError(f"{device} has no memory beside this process ({error})") from error


def _tried(model: PreTrainedModel, argument: Mapping[str, Any]) -> dict[str, Any]:
    autocast_dtype: torch.dtype | None = None
    if argument["autocast_dtype"]:
        autocast_dtype = getattr(torch, argument["autocast_dtype"])
    manager = ContinuousBatchingManager(
        model,
        None,
        RolloutConfig(**argument["settings"]),
        autocast_dtype=autocast_dtype,
    )
    try:
        prompts = _prompts(model)
        _generate(manager, prompts)
        begun = time.perf_counter()
        outputs = _generate(manager, prompts)
        milliseconds = 1000 * (time.perf_counter() - begun) / NEW_TOKENS
        fault = _fault(manager, outputs)
    finally:
        manager.destroy()
    return {"fault": fault, "milliseconds": {"a step": milliseconds}}


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    ids = list(hf_compat.text_token_ids(model))
    longest = hf_compat.max_positions(model) or LONG_TOKENS + NEW_TOKENS
    prompts: list[list[int]] = []
    for row, wanted in enumerate((SHARED_TOKENS, SHARED_TOKENS, LONG_TOKENS, SHORT_TOKENS)):
        length = min(wanted, longest - NEW_TOKENS)
        prompt = list(islice(cycle(ids), length))
        # Prompts that share their first tokens differ in the last.
        prompt[-1] = ids[(row + 1) % len(ids)]
        prompts += [prompt] * len(SAMPLED)
    return prompts


def _generate(
    manager: ContinuousBatchingManager, prompts: Sequence[list[int]]
) -> list[GenerationOutput]:
    ids: list[str] = []
    manager.start()
    for row, prompt in enumerate(prompts):
        params = SAMPLED[row % len(SAMPLED)]
        ids.append(manager.add_request(prompt, None, NEW_TOKENS, sampling_params=params))
    outputs: list[GenerationOutput] = []
    for request_id in ids:
        output = manager.get_result(request_id)
        assert output is not None
        if output.error:
            raise RuntimeError(output.error)
        outputs.append(output)
    return outputs


def _fault(manager: ContinuousBatchingManager, outputs: Sequence[GenerationOutput]) -> str:
    """Return how far log-probabilities are from those of plain forwards; "": only by rounding."""
    runner = manager.engine.runner
    sampled = [torch.tensor(output.logprobs) for output in outputs]

    def plain() -> list[torch.Tensor]:
        return [_plain_logprobs(manager, output) for output in outputs]

    with manager.pause():
        expected = plain()
        higher = torch.float32 if runner.compute_dtype.itemsize < 4 else torch.float64
        with runner.computing_in(higher):
            precise = plain()
    noise = overall_noise(expected, precise, runner.compute_dtype)
    agreement = agrees(sampled, expected, noise.expand(len(sampled)))
    if agreement:
        return ""
    return f"log-probabilities are off its plain forward by {agreement}"


def _plain_logprobs(manager: ContinuousBatchingManager, output: GenerationOutput) -> torch.Tensor:
    tokens = [*output.prompt_ids, *output.generated_tokens]
    logits_TV = manager.engine.runner.plain_logits(tokens)[len(output.prompt_ids) - 1 : -1]
    logprobs_TV = (logits_TV / (output.temperature or 1.0)).log_softmax(-1)
    chosen_T1 = torch.tensor(output.generated_tokens, device=logits_TV.device)[:, None]
    return logprobs_TV.gather(1, chosen_T1)[:, 0].cpu()
