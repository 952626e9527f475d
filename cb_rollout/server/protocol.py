"""Request and error bodies. A field that is not listed is refused: none is silently ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Each stop string is searched for after every token.
MAX_STOPS = 16

RequestId = Annotated[str, Field(min_length=1, max_length=256)]


class Strict(BaseModel):
    """A body that refuses unknown fields, and numbers in text."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
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

    prompt: str | list[str] | list[int] | list[list[int]]
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
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
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

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None


class TokenizeRequest(Strict):
    """Body of `/tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
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
