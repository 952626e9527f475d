"""Bodies of the reinforcement-learning endpoints, with vLLM's names.

Loads no torch. A field that is not listed is refused, as in `server/protocol.py`. A field that
changes nothing here is listed with the reason.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from cb_rollout.server.protocol import (
    MAX_STOPS,
    Biases,
    Items,
    RequestId,
    Stop,
    StreamOptions,
    Strict,
    first_fault,
)

# Most names in one `/abort_requests`.
MAX_REQUEST_IDS = 65_536


Digests = Annotated[dict[str, str], first_fault(lambda value: isinstance(value, str))]


class TokenSampling(Strict):
    """The `sampling_params` of `/inference/v1/generate`."""

    n: Annotated[int, Field(ge=1)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: None = None
    structured_outputs: None = None
    # The answer has no text.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # An answer that is not a stream has all tokens.
    output_kind: Literal[0, 1, 2] | None = None
    # Keys of an older policy version are never matched.
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    # The answer has no experts.
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None


class TokenRequest(Strict):
    """Body of `/inference/v1/generate`: token ids in, token ids out."""

    request_id: RequestId | None = None
    model: str | None = None
    token_ids: Annotated[Items[int], Field(min_length=1)]
    sampling_params: TokenSampling
    return_token_ids: bool | None = None
    """Respond with the prompt's token ids too."""
    output_mode: Literal["tokens"] = "tokens"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    """Accepted and not used: keys of an older policy version are never matched."""
    priority: Literal[0] | None = None
    features: None = None
    content_parts: None = None
    token_offsets: None = None
    reasoning_ended: bool | None = None
    """Accepted and not used: no grammar waits for the end of reasoning."""
    reasoning_parser_kwargs: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class AbortRequest(Strict):
    """Body of `/abort_requests`."""

    request_ids: Annotated[Items[RequestId], Field(max_length=MAX_REQUEST_IDS)] | None = None
    """The clients' own names; none: every request."""


class InitInfo(Strict):
    """The address of a trainer's group; without one, weights come from files."""

    backend: Literal["gloo", "nccl"] = "nccl"
    """vLLM's clients name none, and mean NCCL."""
    master_address: Annotated[str, Field(max_length=255)] | None = None
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)] | None = None
    rank_offset: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    world_size: Annotated[int, Field(ge=2, le=1 << 16)] = 2
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 30
    packed_num_buffers: Annotated[int, Field(ge=1)] = 2
    """Accepted and not used: one buffer is received at a time."""


class InitRequest(Strict):
    """Body of `/init_weight_transfer_engine`."""

    init_info: InitInfo


class StartRequest(Strict):
    """Body of `/start_weight_update`."""

    partial: bool = False
    """Tensors that are not sent keep their values; False: all must be sent."""
    is_checkpoint_format: Literal[True] = True


class BroadcastUpdate(Strict):
    """Tensors that the trainer broadcasts, in this order."""

    names: Annotated[Items[str], Field(min_length=1)]
    dtype_names: Items[str]
    shapes: Items[Items[Annotated[int, Field(ge=0, lt=1 << 40)]]]
    packed: bool | None = None
    sha256: str | None = None
    """Hexadecimal digest of all bytes in this order."""


class FileUpdate(Strict):
    """A safetensors file, or a checkpoint's directory, on the server's machine."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    sha256: Digests | None = None
    """Hexadecimal digests by file name."""


class UpdateRequest(Strict):
    """Body of `/update_weights`: one phase of four, or prime-rl's whole update from files."""

    update_info: BroadcastUpdate | FileUpdate | None = None
    update_id: str | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    sha256: Digests | None = None


class FinishRequest(Strict):
    """Body of `/finish_weight_update`."""

    update_id: str | None = None
    in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    weight_version: Annotated[str, Field(max_length=256)] | None = None


PauseMode = Literal["abort", "wait", "keep"]


def vllm_config(model_name: str, max_model_len: int, dtype: Any, **more: Any) -> dict[str, Any]:
    """Return the parts of vLLM's configuration that its clients read, for `/server_info`."""
    return {
        "model_config": {
            "model": model_name,
            "served_model_name": model_name,
            "dtype": str(dtype),
            "max_model_len": max_model_len,
            "max_logprobs": 20,
            # After the temperature, as TRL's loss recomputes them.
            "logprobs_mode": "processed_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": 1,
        },
        "lora_config": None,
        "weight_transfer_config": None,
        **more,
    }
