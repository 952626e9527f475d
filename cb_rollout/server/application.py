"""The HTTP application: paths, and what each one asks of the policy. The only FastAPI file."""

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
from cb_rollout.metrics.prometheus import CONTENT_TYPE, exposition
from cb_rollout.server import schemas
from cb_rollout.server.answers import Answer, require_sound
from cb_rollout.server.chats import ChatAnswer
from cb_rollout.server.completions import CompletionAnswer
from cb_rollout.server.errors import ApiError, as_api_error
from cb_rollout.server.guard import Guard
from cb_rollout.server.output_router import Submission
from cb_rollout.server.policy import Policy
from cb_rollout.types import GenerationOutput

FAULTS_SHOWN = 3
# Of one body that is not as it should be.

NOT_JSON = "json_invalid"
# What FastAPI 0.165 calls the fault of a body that cannot be read at all.

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (400, 401, 404, 413, 429, 503)
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


class Json(JSONResponse):
    """JSON in ASCII, which any text that a client sent survives."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return _dumps(content).encode("ascii")


class EventStream(StreamingResponse):
    """Server-sent events; whatever ends it ends what it is made of."""

    def __init__(self, events: AsyncIterator[str], submission: Submission) -> None:
        """Send `events` as they come; they are made of `submission`."""
        super().__init__(events, media_type="text/event-stream")
        self._submission = submission

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the end, or until the client is gone."""
        with self._submission:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self.body_iterator.aclose()  # type: ignore[union-attr]


def create_application(policy: Policy) -> Guard:
    """The application, behind its guard."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        policy.start()
        yield
        policy.stop()

    app = FastAPI(
        title="cb_rollout",
        version=cb_rollout.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    _answer_errors(app)
    _add_generation(app, policy)
    _add_inspection(app, policy)
    return Guard(app, policy.options)


def _add_generation(app: FastAPI, policy: Policy) -> None:
    @app.post("/v1/completions", responses=STREAM)
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        """Texts that go on from one prompt or several."""
        policy.require_known(body.model)
        prompts = await _prompts(policy, body.prompt)
        params = await policy.params(body)
        answer = CompletionAnswer(policy, body, prompts, params)
        submission = policy.submit(prompts, params, body.n or 1, body.stream, request.headers)
        return await _answered(answer, submission, body.stream, request)

    @app.post("/v1/chat/completions", responses=STREAM)
    async def chat_completions(body: schemas.ChatRequest, request: Request) -> Response:
        """Assistant messages that go on from a chat."""
        policy.require_known(body.model)
        _require_consistent(body)
        tools = None
        if body.tools and body.tool_choice != "none":
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        prompt_text, prompt_ids = await policy.encode_chat(messages, tools)
        params = await policy.params(body)
        answer = ChatAnswer(policy, body, prompt_text, prompt_ids, params, tools)
        submission = policy.submit([prompt_ids], params, body.n or 1, body.stream, request.headers)
        return await _answered(answer, submission, body.stream, request)


def _add_inspection(app: FastAPI, policy: Policy) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [_card(policy)]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """The same, by name."""
        policy.require_known(model)
        return Json(_card(policy))

    @app.post("/tokenize")
    async def tokenize(body: schemas.TokenizeRequest) -> Response:
        """Token ids of a prompt or a chat, as the model gets them."""
        policy.require_known(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages.", "prompt")
        if body.prompt is not None:
            tokens = await policy.encode_text(body.prompt)
        else:
            messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            _, tokens = await policy.encode_chat(messages, tools)
        content: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": policy.max_model_len,
        }
        if body.return_token_strs:
            content["token_strs"] = policy.tokens.texts(tokens)
        return Json(content)

    @app.get("/health")
    async def health() -> Response:
        """Whether requests are generated."""
        if not policy.is_alive:
            raise ApiError(503, "the server is ending, or its engine stopped.")
        return Json({"status": "ok", "policy_version": policy.manager.engine.policy_version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Every figure, as Prometheus reads it."""
        text = exposition(policy.manager, policy.recorder)
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _card(policy: Policy) -> dict[str, Any]:
    return {
        "id": policy.options.model_name,
        "object": "model",
        "created": policy.created,
        "owned_by": "cb_rollout",
        "max_model_len": policy.max_model_len,
        "policy_version": policy.manager.engine.policy_version,
    }


async def _prompts(policy: Policy, given: Any) -> list[list[int]]:
    """Token ids of every prompt of a completion."""
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_one else given
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; give at least one token.", "prompt")
    return [
        await policy.encode_text(prompt) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def _require_consistent(body: schemas.ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
    is_free = body.response_format is None or body.response_format.type == "text"
    if body.tools and not is_free:
        raise ApiError(
            400, "response_format and tools exclude each other; leave one out.", "response_format"
        )


async def _answered(
    answer: Answer, submission: Submission, is_streaming: bool, request: Request
) -> Response:
    if is_streaming:
        return EventStream(_events(answer, submission), submission)
    with submission:
        outputs = await _unless_gone(_finished(submission), request)
    if outputs is None:
        return Response(status_code=499)  # Nobody reads it.
    return Json(answer.body(outputs))


async def _finished(submission: Submission) -> list[GenerationOutput]:
    """Every sequence's end, in order."""
    outputs: dict[int, GenerationOutput] = {}
    async for index, output in submission.updates():
        require_sound(output)
        outputs[index] = output
    return [outputs[index] for index in sorted(outputs)]


async def _unless_gone(
    work: Coroutine[Any, Any, list[GenerationOutput]], request: Request
) -> list[GenerationOutput] | None:
    """What work comes to; None where the client went away before."""
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


async def _events(answer: Answer, submission: Submission) -> AsyncIterator[str]:
    """A stream's events; an error, once it has begun, is its last one."""
    try:
        for chunk in answer.opening():
            yield _event(chunk)
        async for index, output in submission.updates():
            require_sound(output)
            for chunk in answer.delta(index, output):
                yield _event(chunk)
        for chunk in answer.closing():
            yield _event(chunk)
    except (ApiError, RolloutError, TimeoutError) as error:
        yield _event(as_api_error(error).body)
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {_dumps(content)}\n\n"


def _dumps(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _answer_errors(app: FastAPI) -> None:
    """Every error in one shape; none tells what a client sent, nor what the server is made of."""

    def on(kind: type[Exception], as_error: Callable[[Any], ApiError]) -> None:
        async def handle(_: Request, raised: Exception) -> Response:
            error = as_error(raised)
            return Json(error.body, status_code=error.status, headers=error.headers)

        app.add_exception_handler(kind, handle)

    for kind in (ApiError, RolloutError, TimeoutError):
        on(kind, as_api_error)
    on(HTTPException, lambda error: ApiError(error.status_code, f"{error.detail}."))
    on(RequestValidationError, lambda error: ApiError(400, _faults(error), _first_field(error)))
    on(Exception, lambda _: ApiError(500, "the server failed; its log says why."))


def _faults(error: RequestValidationError) -> str:
    found = []
    for fault in error.errors()[:FAULTS_SHOWN]:
        if fault["type"] == NOT_JSON:
            return f"the body is not JSON ({fault['ctx']['error']} at byte {fault['loc'][-1]})"
        place = ".".join(str(part) for part in fault["loc"] if part != "body")
        found.append(f"{place}: {fault['msg']}" if place else str(fault["msg"]))
    return "; ".join(found)


def _first_field(error: RequestValidationError) -> str | None:
    first = error.errors()[0]
    place = first["loc"]
    return str(place[1]) if len(place) > 1 and first["type"] != NOT_JSON else None
