"""Bodies of OpenAI's Responses API, and the chat that each asks for.

As in `server.protocol`, a field that is not listed is refused, and a field without effect is listed
with the reason.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator

from cb_rollout.server import protocol
from cb_rollout.server.protocol import ApiError, Items, Strict

LOGPROBS = "message.output_text.logprobs"

NOTHING_STORED = "this server keeps no responses; send the earlier items in `input`"

# By field: the value that it may have besides null (several in a tuple), and why it may have no
# other.
REFUSED: dict[str, tuple[Any, str]] = {
    "previous_response_id": (None, NOTHING_STORED),
    "conversation": (None, NOTHING_STORED),
    "store": (False, "this server keeps no responses; leave store out, or set it to false"),
    "background": (False, "a response is answered where it was asked for; leave background out"),
    "prompt": (None, "this server keeps no prompts; send the text in `input`"),
    "truncation": ("disabled", "no input is shortened; send fewer items"),
    "max_tool_calls": (None, "it counts built-in tools, of which this server has none"),
    "context_management": (None, "no input is compacted; send fewer items"),
    "moderation": (None, "this server moderates nothing; leave it out"),
    "service_tier": (("auto", "default"), "this server has one tier; leave service_tier out"),
    "parallel_tool_calls": (True, "the number of calls is the model's; leave it out"),
}


NO_REASONING = "may be null alone: the model's chat template decides how it reasons; leave it out"

# The same, by field of `reasoning`.
REFUSED_REASONING: dict[str, tuple[Any, str]] = {
    "effort": (None, NO_REASONING),
    "summary": (None, "may be null alone: no answer has a summary of reasoning; leave it out"),
    "generate_summary": (None, "may be null alone: it is OpenAI's older name of summary"),
}


def _form(value: Any) -> str | None:
    """Return the tag of a text or a list; None for anything else.

    In errors, a tag with brackets is left out of a field's name.
    """
    if isinstance(value, str):
        return "[text]"
    return "[list]" if isinstance(value, list) else None


def _tagged_form(may_be: str) -> Discriminator:
    return Discriminator(_form, custom_error_type="form", custom_error_message=f"may be {may_be}")


def _tag_of_type(value: Any, default: str | None = None) -> str | None:
    kind = value.get("type", default) if isinstance(value, dict) else None
    return f"[{kind}]" if isinstance(kind, str) else None


class ItemText(Strict):
    """Text of a message, from the client or from an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None
    """Accepted and not used: earlier answers contain them."""


class ItemImage(Strict):
    """A picture of a message, as a data URL."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None
    """Accepted and not used."""
    file_id: None = None


Part = Annotated[
    Annotated[ItemText, Tag("[input_text]")]
    | Annotated[ItemText, Tag("[output_text]")]
    | Annotated[ItemText, Tag("[text]")]
    | Annotated[ItemImage, Tag("[input_image]")],
    Discriminator(
        _tag_of_type,
        custom_error_type="part",
        custom_error_message="may be a part of type input_text, output_text, text or input_image, "
        'such as {"type": "input_text", "text": "Hello"}',
    ),
]
Content = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Items[Part], Tag("[list]")],
    _tagged_form('a text, or a list of parts, such as [{"type": "input_text", "text": "Hello"}]'),
]
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(Strict):
    """Fields of all items; earlier answers contain them, but they are not used."""

    id: str | None = None
    status: Status | None = None


class MessageItem(_Item):
    """A message; this server's answers are accepted unchanged."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = Field(None, validate_default=True)
    content: Content = Field(None, validate_default=True)
    phase: None = None


class FunctionCallItem(_Item):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: None = None


class FunctionOutputItem(_Item):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content = Field(None, validate_default=True)


class ReasoningText(Strict):
    """Text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning before an assistant's message, for templates that use it."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Items[ReasoningText] = Field(None, validate_default=True)
    encrypted_content: None = None


def _item_type(item: Any) -> str | None:
    return _tag_of_type(item, "message")


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(
        _item_type,
        custom_error_type="item",
        custom_error_message="may be an item of type message, function_call, function_call_output "
        'or reasoning, such as {"role": "user", "content": "Hello"}',
    ),
]
Input = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[Annotated[Items[Item], Field(min_length=1)], Tag("[list]")],
    _tagged_form('a text, or a list of items, such as [{"role": "user", "content": "Hello"}]'),
]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Constrain the arguments of its calls by `parameters`; left out: False."""
    defer_loading: Literal[False] | None = None


class TextFormat(Strict):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Accepted and not used: a schema is always enforced."""


class TextConfig(Strict):
    """Settings of an answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """The default of OpenAI's API; a model cannot be asked for another verbosity."""


class ReasoningConfig(Strict):
    """Settings of reasoning; none of them is available."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None

    @field_validator(*REFUSED_REASONING)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        return protocol.require_allowed(REFUSED_REASONING, value, info)


class EventOptions(Strict):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(protocol.Sampling):
    """Body of `/v1/responses`."""

    input: Input = Field(None, validate_default=True)
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False
    stream_options: EventOptions | None = None
    tools: Items[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    """Encrypted reasoning content is never included, because no answer has a reasoning item."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    top_k: int | None = None
    request_id: protocol.RequestId | None = None
    """The client's own name for the request, for `/abort_requests`."""
    user: str | None = None
    """Accepted and not used, like the next two fields."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    previous_response_id: Any = None
    conversation: Any = None
    store: Any = None
    background: Any = None
    prompt: Any = None
    truncation: Any = None
    max_tool_calls: Any = None
    context_management: Any = None
    moderation: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None

    @field_validator(*REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        return protocol.require_allowed(REFUSED, value, info)

    @field_validator("reasoning", mode="before")
    @classmethod
    def _require_object(cls, value: Any) -> Any:
        if value is None or isinstance(value, dict | ReasoningConfig):
            return value
        names = " and ".join(name for name in REFUSED_REASONING if name != "generate_summary")
        raise ValueError(f"may be null, or an object whose {names} are null; leave it out")

    @property
    def asks_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def chat_request(body: ResponsesRequest) -> protocol.ChatCompletionRequest:
    """Return the chat that a body asks for; `ApiError`: the body contradicts itself."""
    if body.top_logprobs and not body.asks_logprobs:
        raise ApiError(400, f'top_logprobs needs include=["{LOGPROBS}"].', "top_logprobs")
    if body.asks_logprobs and body.tools:
        why = "an answer with tools has no log-probabilities; leave out include or tools."
        raise ApiError(400, why, "include")
    sampling = {name: getattr(body, name) for name in protocol.Sampling.model_fields}
    sampling["top_k"] = body.top_k
    # A chat's body expects the keys as JSON has them: strings.
    if sampling["logit_bias"] is not None:
        sampling["logit_bias"] = {str(key): bias for key, bias in sampling["logit_bias"].items()}
    return protocol.ChatCompletionRequest(
        **sampling,
        messages=[protocol.Message(**message) for message in _messages(body)],
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        logprobs=True if body.asks_logprobs else None,
        top_logprobs=body.top_logprobs,
        response_format=_response_format(body.text),
        tools=[_chat_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=body.tool_choice,
        request_id=body.request_id,
    )


def _response_format(text: TextConfig | None) -> protocol.ResponseFormat | None:
    form = None if text is None else text.format
    if form is None:
        return None
    schema = None
    if form.type == "json_schema":
        schema = protocol.JsonSchema(name=form.name or "", schema=form.json_schema)
    return protocol.ResponseFormat(type=form.type, json_schema=schema)


def _chat_tool(tool: FunctionTool) -> protocol.Tool:
    function = protocol.FunctionDefinition(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return protocol.Tool(type="function", function=function)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return a chat's messages; a tool call joins the assistant's message before it."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    reasoning: str | None = None
    number = 0
    for number, item in enumerate(body.input):
        if isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content)
            continue
        message = _message(item)
        if reasoning is not None:
            if message["role"] != "assistant":
                raise _lone_reasoning(number - 1)
            message["reasoning_content"] = reasoning
            reasoning = None
        follows_answer = bool(messages) and messages[-1]["role"] == "assistant"
        is_joined = isinstance(item, FunctionCallItem) and follows_answer
        if is_joined and "reasoning_content" not in message:
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    if reasoning is not None:
        raise _lone_reasoning(number)
    return messages


def _lone_reasoning(number: int) -> ApiError:
    why = (
        f"input.{number}: no assistant's item follows a reasoning item; add the assistant's "
        "message or function_call, or leave the reasoning out."
    )
    return ApiError(400, why, "input")


def _message(item: MessageItem | FunctionCallItem | FunctionOutputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": _content(item.content)}
    if isinstance(item, FunctionOutputItem):
        content = _content(item.output)
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_chat_part(part) for part in content]


def _chat_part(part: ItemText | ItemImage) -> dict[str, Any]:
    if isinstance(part, ItemText):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}
