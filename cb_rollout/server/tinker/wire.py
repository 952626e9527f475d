"""Translate between Tinker's messages and tensors.

The client sends the data of a forward as protobuf, and receives samples and outputs of a loss as
protobuf; everything else is JSON. Requests are read on the server's asyncio thread; results are
written on the job thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as messages

from cb_rollout.errors import InvalidRequestError
from cb_rollout.types import FinishReason, GenerationOutput, ScoredText

# Placeholders of the API for a missing token among the top-k tokens of a position.
NO_TOKEN_ID = 0
NO_LOGPROB = -99999.0

_DTYPES = {
    messages.DTYPE_FLOAT32: np.dtype(np.float32),
    messages.DTYPE_INT64: np.dtype(np.int64),
    messages.DTYPE_INT32: np.dtype(np.int32),
}

TopTokens = Sequence[Sequence[tuple[int, float]] | None]


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to compute a loss on."""

    token_ids: list[int]
    """The N input tokens."""
    inputs: dict[str, torch.Tensor]
    """Inputs of the loss by name: `target_tokens` int64 (N,), others float32 (N,)."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    """Data of one forward, and of its backward."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss: str
    settings: dict[str, float | str]
    """Settings of the loss, by name."""
    is_forward_only: bool
    """True: gradients stay as they are."""


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Return the request that a body holds.

    Raises:
        InvalidRequestError: the body is not such a message, or has images, sounds or sparse
            tensors.
    """
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise InvalidRequestError(f"the body is no ForwardBackwardRequest ({error}).") from error
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        settings[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return ForwardBackwardRequest(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(index, datum) for index, datum in enumerate(message.data)],
        loss=message.loss_fn,
        settings=settings,
        is_forward_only=message.forward_only,
    )


def _datum(index: int, message: Any) -> Datum:
    token_ids: list[int] = []
    for chunk in message.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise InvalidRequestError(
                f"datum {index} holds a chunk of {chunk.WhichOneof('chunk')}; text alone is taken."
            )
        tokens = chunk.encoded_text.tokens
        token_ids += _numbers(f"datum {index}: its tokens", tokens, np.int32).tolist()
    inputs: dict[str, torch.Tensor] = {}
    for name, tensor in message.loss_fn_inputs.items():
        inputs[name] = _tensor(f"datum {index}: {name}", tensor)
    return Datum(token_ids, inputs)


def _numbers(name: str, content: bytes, dtype: Any) -> np.ndarray:
    """Return the numbers in some bytes."""
    num_bytes = np.dtype(dtype).itemsize
    if len(content) % num_bytes:
        raise InvalidRequestError(
            f"{name}: {len(content)} bytes are no whole number of {num_bytes}-byte values."
        )
    return np.frombuffer(content, dtype)


def _tensor(name: str, message: Any) -> torch.Tensor:
    if message.HasField("sparse_csr"):
        raise InvalidRequestError(f"{name} is sparse; send it dense, of shape (tokens,).")
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidRequestError(f"{name} is of a dtype that is not read; send float32 or int64.")
    values = _numbers(name, message.dense, dtype).copy()
    shape = tuple(message.shape) or values.shape
    if int(np.prod(shape)) != values.size:
        raise InvalidRequestError(f"{name} has {values.size} values and the shape {shape}.")
    return torch.from_numpy(values.reshape(shape))


def text_of_prompt(prompt: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a `ModelInput` in JSON.

    Raises:
        InvalidRequestError: a chunk is not text.
    """
    token_ids: list[int] = []
    for chunk in prompt.get("chunks", ()):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise InvalidRequestError(
                f"the prompt holds a chunk of {chunk.get('type')}; text alone is taken."
            )
        token_ids += chunk["tokens"]
    return token_ids


def written_outputs(
    outputs: Sequence[Mapping[str, torch.Tensor]], metrics: Mapping[str, float]
) -> bytes:
    """Return a loss's outputs for each datum as protobuf; the names are the same for all data."""
    message = messages.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", metrics=dict(metrics)
    )
    record = message.loss_fn_outputs.add()
    record.num_datums = len(outputs)
    for name in outputs[0] if outputs else ():
        of_data = [output[name].detach().float().cpu().numpy() for output in outputs]
        sizes = [values.nbytes for values in of_data]
        batched = record.fields[name]
        batched.dtype = messages.DTYPE_FLOAT32
        batched.data = b"".join(values.tobytes() for values in of_data)
        batched.offsets = np.cumsum([0, *sizes], dtype=np.int64).tobytes()
    return message.SerializeToString()


def written_samples(
    outputs: Sequence[GenerationOutput],
    scores: ScoredText | None,
    num_top: int,
    first_scored: int,
) -> bytes:
    """Return the samples of a prompt as protobuf.

    Args:
        outputs: the prompt's completions.
        scores: log-probabilities of the prompt's tokens; None: not requested.
        num_top: number of likeliest tokens at each position of a completion; 0: not requested.
        first_scored: index of the first token of the prompt whose scores are sent.
    """
    message = messages.SampleResponse()
    for output in outputs:
        sequence = message.sequences.add()
        is_stop = output.finish_reason is FinishReason.STOP
        sequence.stop_reason = messages.STOP_REASON_STOP if is_stop else messages.STOP_REASON_LENGTH
        sequence.tokens = np.array(output.generated_tokens, np.int32).tobytes()
        sequence.logprobs = np.array(output.logprobs, np.float32).tobytes()
        if num_top:
            _write_top(sequence.topk_sampled_logprobs, output.top_logprobs or [], num_top)
    if scores is not None:
        logprobs = [np.nan if value is None else value for value in scores.logprobs]
        logprobs[:first_scored] = [np.nan] * first_scored
        message.prompt_logprobs = np.array(logprobs, np.float32).tobytes()
        if scores.top_logprobs is not None:
            places: list[Any] = list(scores.top_logprobs)
            places[:first_scored] = [None] * first_scored
            num_scored = max(len(place or ()) for place in places)
            _write_top(message.topk_prompt_logprobs, places, num_scored)
    return message.SerializeToString()


def _write_top(message: Any, places: TopTokens, num_top: int) -> None:
    token_ids = np.full((len(places), num_top), NO_TOKEN_ID, np.int32)
    logprobs = np.full((len(places), num_top), NO_LOGPROB, np.float32)
    for index, place in enumerate(places):
        for rank, (token_id, logprob) in enumerate(place or ()):
            token_ids[index, rank] = token_id
            logprobs[index, rank] = logprob
    message.length, message.k = token_ids.shape
    message.token_ids = token_ids.tobytes()
    message.logprobs = logprobs.tobytes()
