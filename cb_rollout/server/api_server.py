"""The HTTP application: routes, streams and error responses. The only file that imports FastAPI."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import cb_rollout
from cb_rollout.errors import RolloutError
from cb_rollout.metrics.exposition import CONTENT_TYPE, exposition
from cb_rollout.server import protocol
from cb_rollout.server.errors import ApiError, as_api_error
from cb_rollout.server.middleware import AccessMiddleware
from cb_rollout.server.output_router import Submission
from cb_rollout.server.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    require_generated,
)
from cb_rollout.server.served_model import ServedModel
from cb_rollout.types import GenerationOutput

# Most faults that the answer to an invalid body lists.
MAX_FAULTS = 3

# FastAPI 0.165's type of the fault for a body that is not JSON.
NOT_JSON = "json_invalid"

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.ErrorResponse} for status in (400, 401, 404, 413, 429, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


class _Json(JSONResponse):
    """JSON in ASCII, so that any text of a client can be sent back, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return _dumps(content).encode("ascii")


class _EventStream(StreamingResponse):
    """Server-sent events of a submission, which ends with the stream."""

    def __init__(self, events: AsyncIterator[str], submission: Submission) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._submission = submission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._submission:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()  # type: ignore[union-attr]


def create_app(served: ServedModel) -> AccessMiddleware:
    """Create the ASGI application, with access control in front."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served.start()
        yield
        served.stop()

    app = FastAPI(
        title="cb_rollout",
        version=cb_rollout.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    _add_error_handlers(app)
    _add_generation(app, served)
    _add_inspection(app, served)
    return AccessMiddleware(app, served.options)


def _add_generation(app: FastAPI, served: ServedModel) -> None:
    @app.post("/v1/completions", responses=STREAM)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""
        served.require_known(body.model)
        prompts = await _encoded_prompts(served, body.prompt)
        params = await served.sampling_params(body)
        builder = CompletionResponseBuilder(served, body, prompts, params)
        submission = served.submit(prompts, params, body.n or 1, body.stream, request.headers)
        return await _respond(builder, submission, body.stream, request)

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat_completions(body: protocol.ChatCompletionRequest, request: Request) -> Response:
        """Answer a chat."""
        served.require_known(body.model)
        _require_consistent(body)
        tools = None
        if body.tools and body.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        prompt_text, prompt_ids = await served.encode_chat(messages, tools)
        params = await served.sampling_params(body)
        builder = ChatResponseBuilder(served, body, prompt_text, prompt_ids, params, tools)
        submission = served.submit([prompt_ids], params, body.n or 1, body.stream, request.headers)
        return await _respond(builder, submission, body.stream, request)


def _add_inspection(app: FastAPI, served: ServedModel) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        """List the one model that is served."""
        return _Json({"object": "list", "data": [_model_card(served)]})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        """Describe the served model."""
        served.require_known(model)
        return _Json(_model_card(served))

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest) -> Response:
        """Return the token ids of a prompt or a chat, as the model reads them."""
        served.require_known(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages.", "prompt")
        if body.prompt is not None:
            tokens = await served.encode_text(body.prompt)
        else:
            messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            _, tokens = await served.encode_chat(messages, tools)
        content: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": served.max_model_len,
        }
        if body.return_token_strs:
            content["token_strs"] = served.tokens.texts(tokens)
        return _Json(content)

    @app.get("/health")
    async def health() -> Response:
        """Answer 200 if requests are generated, else 503."""
        if not served.is_alive:
            raise ApiError(503, "the server is ending, or its engine stopped.")
        return _Json({"status": "ok", "policy_version": served.manager.policy_version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return every metric in Prometheus' text format."""
        text = exposition(served.manager, served.recorder)
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _model_card(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.options.model_name,
        "object": "model",
        "created": served.created,
        "owned_by": "cb_rollout",
        "max_model_len": served.max_model_len,
        "policy_version": served.manager.policy_version,
    }


async def _encoded_prompts(served: ServedModel, given: Any) -> list[list[int]]:
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_one else given
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; give at least one token.", "prompt")
    return [
        await served.encode_text(prompt) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _require_consistent(body: protocol.ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
    is_free = body.response_format is None or body.response_format.type == "text"
    if body.tools and not is_free:
        raise ApiError(
            400, "response_format and tools exclude each other; leave one out.", "response_format"
        )


async def _respond(
    builder: ResponseBuilder, submission: Submission, is_streaming: bool, request: Request
) -> Response:
    if is_streaming:
        return _EventStream(_events(builder, submission), submission)
    with submission:
        outputs = await _unless_gone(_finished(submission), request)
    if outputs is None:
        # The client is gone; nobody reads this.
        return Response(status_code=499)
    return _Json(builder.whole(outputs))


async def _finished(submission: Submission) -> list[GenerationOutput]:
    """Wait for every sequence, and return them in order."""
    outputs: dict[int, GenerationOutput] = {}
    async for index, output in submission.updates():
        require_generated(output)
        outputs[index] = output
    return [outputs[index] for index in sorted(outputs)]


async def _unless_gone(
    work: Coroutine[Any, Any, list[GenerationOutput]], request: Request
) -> list[GenerationOutput] | None:
    """Return the result of `work`, or None if the client disconnects before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(builder: ResponseBuilder, submission: Submission) -> AsyncIterator[str]:
    """Yield a stream's events; an error is the last one."""
    try:
        for chunk in builder.first_chunks():
            yield _event(chunk)
        async for index, output in submission.updates():
            require_generated(output)
            for chunk in builder.chunks(index, output):
                yield _event(chunk)
        for chunk in builder.last_chunks():
            yield _event(chunk)
    except (ApiError, RolloutError, TimeoutError) as error:
        yield _event(as_api_error(error).body)
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {_dumps(content)}\n\n"


def _dumps(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every exception in one shape, without the server's internals."""

    def on(kind: type[Exception], as_error: Callable[[Any], ApiError]) -> None:
        async def handle(_: Request, raised: Exception) -> Response:
            error = as_error(raised)
            return _Json(error.body, status_code=error.status, headers=error.headers)

        app.add_exception_handler(kind, handle)

    for kind in (ApiError, RolloutError, TimeoutError):
        on(kind, as_api_error)
    on(HTTPException, lambda error: ApiError(error.status_code, f"{error.detail}."))
    on(RequestValidationError, lambda error: ApiError(400, _faults(error), _first_field(error)))
    on(Exception, lambda _: ApiError(500, "the server failed; its log says why."))


def _faults(error: RequestValidationError) -> str:
    if isinstance(error.body, bytes):
        # FastAPI parses no body that its header does not declare; docs/security.md says why.
        return "the body is not declared as JSON; send the header Content-Type: application/json."
    found = []
    for fault in error.errors()[:MAX_FAULTS]:
        if fault["type"] == NOT_JSON:
            return f"the body is not JSON ({fault['ctx']['error']} at byte {fault['loc'][-1]})"
        place = ".".join(str(part) for part in fault["loc"] if part != "body")
        found.append(f"{place}: {fault['msg']}" if place else str(fault["msg"]))
    return "; ".join(found)


def _first_field(error: RequestValidationError) -> str | None:
    first = error.errors()[0]
    place = first["loc"]
    return str(place[1]) if len(place) > 1 and first["type"] != NOT_JSON else None
