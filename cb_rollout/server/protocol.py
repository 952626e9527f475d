"""Request and error bodies. A field that is not listed is refused: none is silently ignored.

A body with many faults is not read to its end: pydantic takes seconds and gigabytes to report each.
"""

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

T = TypeVar("T")

# Each stop string is searched for after every token.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1024

# Most faults that the answer to an invalid body lists.
MAX_FAULTS = 3

RequestId = Annotated[str, Field(min_length=1, max_length=256)]

# A list of which nothing is read after the first item at fault.
Items = Annotated[list[T], Field(fail_fast=True)]


class Strict(BaseModel):
    """A body that refuses unknown fields, and numbers in text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _with_few_faults(cls, value: Any) -> Any:
        """Drop unknown fields but the first few, each of which is reported."""
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = list(islice((name for name in value if name not in known), MAX_FAULTS + 1))
        if len(unknown) <= MAX_FAULTS:
            return value
        return {name: value[name] for name in (*unknown[:MAX_FAULTS], *known) if name in value}


def first_fault(is_right: Callable[[Any], bool]) -> BeforeValidator:
    """Return a validator that leaves of an object with a wrong value that value only."""

    def leave_one(value: Any) -> Any:
        if isinstance(value, dict):
            wrong = (name for name, item in value.items() if not is_right(item))
            for name in wrong:
                return {name: value[name]}
        return value

    return BeforeValidator(leave_one)


def _is_bias(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100


Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    first_fault(_is_bias),
]

Stop = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool = False


class _Sampling(Strict):
    """Fields of both endpoints; a field left out takes the served model's default."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Biases | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool = False
    """Respond with token ids and the policy version of each token."""
    return_tokens_as_token_ids: bool = False
    """Write the tokens of log-probabilities as `token_id:7`, not as text."""
    request_id: RequestId | None = None
    """The client's own name of the request, for `/abort_requests`; several may share one."""
    user: str | None = None
    """Accepted and not used."""


class CompletionRequest(_Sampling):
    """Body of `/v1/completions`."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TextPart(Strict):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """A picture, as a data URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Accepted and not used."""


class ImagePart(Strict):
    """One picture of a message's content."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Strict):
    """A function's name and its arguments, as JSON in a string."""

    name: str
    arguments: str


class ToolCall(Strict):
    """One tool call of an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One message of a chat; this server's answers are accepted unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedToolChoice(Strict):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: NamedFunction


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


class ChatCompletionRequest(_Sampling):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None


class TokenizeRequest(Strict):
    """Body of `/tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Items[Tool] | None = None
    return_token_strs: bool = False


class ErrorInfo(BaseModel):
    """The error of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of every error response."""

    error: ErrorInfo
