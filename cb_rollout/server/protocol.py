"""Define the bodies of requests, with OpenAI's and vLLM's field names, and of errors.

A field that is not listed is refused; a field without effect is listed with the reason. A body is
not read past its first faults, because pydantic takes seconds and gigabytes to report every fault.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cb_rollout.config.checks import whole_number
from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError

T = TypeVar("T")

# Each stop string is searched for after every token.
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024

# Maximum number of faults that the answer to an invalid body lists.
MAX_FAULTS = 3

# Maximum number of likely tokens to report at each position of a prompt: a teacher's top-k.
MAX_PROMPT_LOGPROBS = 128

# Maximum number of names in one `/abort_requests`.
MAX_REQUEST_IDS = 65_536

# Types of errors, by HTTP status.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}

# Sent when the queue is full: about the time that a short sequence takes.
RETRY_AFTER_SECONDS = 1

RequestId = Annotated[str, Field(min_length=1, max_length=256)]

# A list that is not read past its first invalid item.
Items = Annotated[list[T], Field(fail_fast=True)]


class Strict(BaseModel):
    """A body that refuses unknown fields, and numbers that are sent as text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_few_faults(cls, value: Any) -> Any:
        """Keep only the first few unknown fields, because each is reported."""
        if not isinstance(value, dict):
            return value
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        num_unknown = 0
        for name, content in value.items():
            if name not in fields:
                num_unknown += 1
                if num_unknown > MAX_FAULTS:
                    continue
            kept[name] = content
        return kept


def _by_token(biases: dict[str, Any]) -> dict[int, float]:
    for bias in biases.values():
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"{bias!r:.100} is not a number in [-100, 100]")
    try:
        # Two spellings of one number would give one token two biases.
        return {whole_number(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise ValueError(f"a key is not a token id: {error}") from None


def require_allowed(
    refused: Mapping[str, tuple[Any, str]], value: Any, info: ValidationInfo
) -> Any:
    """Return a field's value if it is allowed, or raise `ValueError` with the reason.

    Args:
        refused: by field, the value that it may have besides None, or several values in a tuple;
            and the reason why other values are refused.
        value: the field's value.
        info: pydantic's validation info, which has the field's name.
    """
    assert info.field_name is not None
    allowed, reason = refused[info.field_name]
    values = allowed if isinstance(allowed, tuple) else (allowed,)
    is_allowed = any(type(value) is type(each) and value == each for each in values)
    if value is not None and not is_allowed:
        raise ValueError(reason)
    return value


Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


class EndRequest(Strict):
    """Body of `/sessions/{session}/end`."""

    reward: Annotated[float, Field(allow_inf_nan=False)] | bool


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool = False


class Sampling(Strict):
    """Sampling settings; a field left out takes the served model's default."""

    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, Any], AfterValidator(_by_token)] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None


class _TextRequest(Sampling):
    """Fields of both of OpenAI's endpoints."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    top_k: int | None = None
    return_token_ids: bool = False
    """Respond with token ids and the policy version of each token."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens of log-probabilities as `token_id:7`, not as text."""
    request_id: RequestId | None = None
    """The client's own name for the request, for `/abort_requests`; requests may share a name."""
    user: str | None = None
    """Accepted and not used."""


class CompletionRequest(_TextRequest):
    """Body of `/v1/completions`."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None
    """vLLM's field: respond with log-probabilities of the prompt's tokens, and of this many likely
    tokens at each position."""


class TextPart(Strict):
    """Text of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """A picture, as a data URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Accepted and not used."""


class ImagePart(Strict):
    """A picture of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Strict):
    """A function's name and its arguments, as JSON in a string."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A tool call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """A message of a chat; this server's answers are accepted unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = Field(default=None, validate_default=True)
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _require_content(cls, content: Any, info: Any) -> Any:
        if content is None and info.data.get("role", "assistant") != "assistant":
            raise ValueError("a message of this role needs content")
        return content


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema for the chat template."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Constrain the arguments of this function's calls by `parameters`."""


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class JsonSchema(Strict):
    """The JSON schema of an answer."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionRequest(_TextRequest):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None


class TokenSampling(Sampling):
    """The `sampling_params` of `/inference/v1/generate`."""

    n: Annotated[int, Field(ge=1)] = 1
    top_k: Annotated[int, Field(ge=-1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: None = None
    structured_outputs: None = None
    # The answer has no text.
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Only streams differ: an answer that is not a stream has all tokens.
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
    """The names that clients gave their requests; None: every request."""


class InitInfo(Strict):
    """The address of a trainer's group; without an address, weights come from files."""

    backend: Literal["gloo", "nccl"] = "nccl"
    """vLLM's clients send no backend, and mean NCCL."""
    master_address: Annotated[str, Field(max_length=255)] | None = None
    master_port: Annotated[int, Field(ge=1, lt=1 << 16)] | None = None
    rank_offset: Annotated[int, Field(ge=1, lt=1 << 16)] = 1
    world_size: Annotated[int, Field(ge=2, le=1 << 16)] = 2
    packed: bool = False
    """Refused if True: each broadcast carries one tensor."""


class InitRequest(Strict):
    """Body of `/init_weight_transfer_engine`."""

    init_info: InitInfo


class StartRequest(Strict):
    """Body of `/start_weight_update`."""

    partial: bool = False
    """True: tensors that are not sent keep their values; False: all tensors must be sent."""
    is_checkpoint_format: Literal[True] = True


class BroadcastUpdate(Strict):
    """Tensors that the trainer broadcasts, in this order."""

    names: Annotated[Items[str], Field(min_length=1)]
    dtype_names: Items[str]
    shapes: Items[Items[Annotated[int, Field(ge=0, lt=1 << 40)]]]
    packed: Literal[False] | None = None


class FileUpdate(Strict):
    """A safetensors file, or a checkpoint's directory, on the server's machine."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]


class UpdateRequest(Strict):
    """Body of `/update_weights`: a phase of an update, or prime-rl's whole update from files."""

    update_info: BroadcastUpdate | FileUpdate | None = None
    update_id: str | None = None
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


class FinishRequest(Strict):
    """Body of `/finish_weight_update`."""

    update_id: str | None = None
    in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    weight_version: Annotated[str, Field(max_length=256)] | None = None


PauseMode = Literal["abort", "keep"]


class ApiError(Exception):
    """An error response: its HTTP status, the fault with what to change, and the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        code = TYPES.get(self.status, "server_error")
        error = {"message": self.message, "type": code, "param": self.param, "code": code}
        # Xinference's client shows its user `detail`.
        return {"error": error, "detail": self.message}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.status == 429:
            return {"retry-after": str(RETRY_AFTER_SECONDS)}
        return {}


def as_api_error(error: Exception) -> ApiError:
    """Return the error response for an exception."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            # The client sent one prompt, not an input of a batch, and uses OpenAI's names.
            text = re.sub(r"^input 0(?=:| has| is| holds)", "the prompt", str(error))
            return ApiError(400, text.replace("max_new_tokens", "max_tokens"))
        case QueueFullError():
            return ApiError(429, str(error))
        case EngineDeadError():
            return ApiError(503, "the engine stopped, and its log says why; try again later.")
        case TimeoutError():
            return ApiError(503, "the request took longer than the server allows; ask for less.")
        case RolloutError():
            return ApiError(503, str(error))
        case RecursionError():
            return ApiError(400, "the body nests too deeply.")
    return ApiError(500, "the server failed; its log says why.")
