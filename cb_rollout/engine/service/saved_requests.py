"""Save unfinished sequences as plain data, and create requests that continue them.

A sequence's draws depend on its seed and on each token's index, so a restored sequence continues
with the same draws as without the stop. Its keys are computed again. Called by the thread that
paused the engine.
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.prompt_images import Image, PromptImages
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.stop_strings import StopStrings
from cb_rollout.engine.service.input_processor import InputProcessor
from cb_rollout.errors import RolloutError
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus

State = dict[str, Any]
"""Numbers, text, lists, dicts and tensors, as `torch.load(weights_only=True)` reads them."""

_OWN_FIELDS = ("request_id", "max_new_tokens", "seed", "group", "is_streaming")
_IMAGE_FIELDS = ("num_prompt_tokens", "is_divided", "may_be_cut", "position_offset", "positions")
_OUTPUT_FIELDS = (
    "request_id",
    "prompt_ids",
    "generated_tokens",
    "logprobs",
    "error",
    "policy_versions",
    "top_logprobs",
    "temperature",
    "adapter",
    "prompt_logprobs",
    "prompt_top_logprobs",
)


def saved_request(request: Request) -> State:
    """Return an unfinished sequence as plain data.

    Raises:
        RolloutError: it is sampled under a grammar, whose state only the grammar knows.
    """
    params = request.params
    if params.grammar is not None:
        raise RolloutError(
            f"{request.request_id} is sampled under a grammar, and cannot be saved before it ends; "
            "take its result first, or cancel it."
        )
    state: State = {name: getattr(request, name) for name in _OWN_FIELDS}
    num_prompt = len(request.prompt_ids)
    state |= {
        "prompt_ids": list(request.prompt_ids),
        "generated_tokens": request.token_ids[num_prompt:],
        "logprobs": list(request.logprobs),
        "top_logprobs": list(request.top_logprobs),
        "kept_token_ids": _saved_ids(request.kept_token_ids[: request.num_generated]),
        "policy_starts": list(request.policy_starts),
        "stop_tokens": sorted(request.stop_tokens),
        "params": {field.name: getattr(params, field.name) for field in fields(params)},
        "timestamps": None,
        "routed_experts": _saved_array(request.routed_experts),
        "images": _saved_images(request.images),
    }
    if request.records_timestamps:
        # Seconds since the submission: the clocks of two processes have nothing in common.
        state["timestamps"] = [stamp - request.created_time for stamp in request.timestamps]
    return state


def restored_request(
    state: Mapping[str, Any], input_processor: InputProcessor, num_versions: int = 0
) -> Request:
    """Return a request that continues from a saved request's tokens.

    Args:
        state: what `saved_request` returned.
        input_processor: decodes for stop strings.
        num_versions: added to the number of each policy version.

    Raises:
        InvalidRequestError: there are stop strings, and no tokenizer.
    """
    params = SamplingParams(**state["params"])
    timestamps = state["timestamps"]
    request = Request(
        **{name: state[name] for name in _OWN_FIELDS},
        prompt_ids=list(state["prompt_ids"]),
        params=params,
        stop_tokens=frozenset(state["stop_tokens"]),
        images=_restored_images(state["images"]),
        records_timestamps=timestamps is not None,
        stop_strings=_restored_stop_strings(params, state, input_processor),
    )
    if state["generated_tokens"]:
        request.token_ids = [*request.prompt_ids, *state["generated_tokens"]]
    request.logprobs = list(state["logprobs"])
    # Pairs are tuples here, and may be lists in a file.
    for likeliest in state["top_logprobs"]:
        request.top_logprobs.append([(token_id, value) for token_id, value in likeliest])
    request.kept_token_ids = [array("i", ids) for ids in state["kept_token_ids"]]
    request.policy_starts = _renumbered(state["policy_starts"], num_versions)
    if timestamps is not None:
        request.timestamps = [request.created_time + seconds for seconds in timestamps]
    request.routed_experts = _restored_array(state["routed_experts"])
    return request


def _restored_stop_strings(
    params: SamplingParams, state: Mapping[str, Any], input_processor: InputProcessor
) -> StopStrings | None:
    """Return the detector of stop strings, which has seen the tokens so far."""
    stop_strings = input_processor.stop_strings(params)
    if stop_strings is not None:
        for token_id in state["generated_tokens"]:
            stop_strings.found_with(token_id)
    return stop_strings


def saved_output(output: GenerationOutput) -> State:
    """Return an output that nobody took yet as plain data."""
    state: State = {name: getattr(output, name) for name in _OUTPUT_FIELDS}
    finish_reason = None
    if output.finish_reason is not None:
        finish_reason = output.finish_reason.value
    kept_token_ids = None
    if output.kept_token_ids is not None:
        kept_token_ids = _saved_ids(output.kept_token_ids)
    timestamps = output.timestamps
    if timestamps is not None:
        timestamps = [stamp - output.created_time for stamp in timestamps]
    return state | {
        "status": output.status.value,
        "finish_reason": finish_reason,
        "kept_token_ids": kept_token_ids,
        "routed_experts": _saved_array(output.routed_experts),
        "images": _saved_images(output.images),
        # Seconds since the submission, as in a saved request.
        "timestamps": timestamps,
        "lifespan": _moved(output.lifespan, -output.created_time),
    }


def restored_output(state: Mapping[str, Any], num_versions: int = 0) -> GenerationOutput:
    """Return a saved output; `num_versions` is added to the number of each policy version."""
    created_time = time.perf_counter()
    finish_reason = None
    if state["finish_reason"] is not None:
        finish_reason = FinishReason(state["finish_reason"])
    kept_token_ids: list[Sequence[int]] | None = None
    if state["kept_token_ids"] is not None:
        kept_token_ids = [array("i", ids) for ids in state["kept_token_ids"]]
    timestamps = state["timestamps"]
    if timestamps is not None:
        timestamps = [created_time + seconds for seconds in timestamps]
    began, ended = _moved(state["lifespan"], created_time)
    plain = {name: state[name] for name in _OUTPUT_FIELDS}
    plain["policy_versions"] = _renumbered(state["policy_versions"], num_versions)
    return GenerationOutput(
        **plain,
        status=RequestStatus(state["status"]),
        finish_reason=finish_reason,
        kept_token_ids=kept_token_ids,
        routed_experts=_restored_array(state["routed_experts"]),
        images=_restored_images(state["images"]),
        created_time=created_time,
        timestamps=timestamps,
        lifespan=(began, ended),
    )


def _moved(moments: Sequence[float], seconds: float) -> list[float]:
    """Add seconds to each moment of a lifespan; -1, not yet, stays."""
    return [moment if moment < 0 else moment + seconds for moment in moments]


def _renumbered(runs: Sequence[Sequence[int]], num_versions: int) -> list[tuple[int, int]]:
    """Add to the policy version of each run of tokens."""
    return [(version + num_versions, number) for version, number in runs]


def _saved_ids(kept: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(ids) for ids in kept]


def _saved_array(values: Any) -> torch.Tensor | None:
    """Return a numpy array as a tensor, or None for None."""
    if values is None:
        return None
    return torch.from_numpy(values.copy())


def _restored_array(values: torch.Tensor | None) -> Any:
    if values is None:
        return None
    return values.numpy()


def _saved_images(images: PromptImages | None) -> State | None:
    """Return a prompt's images as plain data; None if it has none."""
    if images is None:
        return None
    state: State = {name: getattr(images, name) for name in _IMAGE_FIELDS}
    of_images: list[State] = []
    for image in images.images:
        of_image = {
            "first_token": image.tokens.start,
            "end_token": image.tokens.stop,
            "digest": image.digest.hex(),
            "tensors": dict(image.tensors),
        }
        of_images.append(of_image)
    return state | {
        "images": of_images,
        "of_tokens": dict(images.of_tokens),
        "dims": dict(images.dims),
    }


def _restored_images(state: Mapping[str, Any] | None) -> PromptImages | None:
    if state is None:
        return None
    images: list[Image] = []
    for of_image in state["images"]:
        image = Image(
            tokens=range(of_image["first_token"], of_image["end_token"]),
            digest=bytes.fromhex(of_image["digest"]),
            tensors=of_image["tensors"],
        )
        images.append(image)
    return PromptImages(
        **{name: state[name] for name in _IMAGE_FIELDS},
        images=tuple(images),
        of_tokens=state["of_tokens"],
        dims=state["dims"],
    )
