"""The HTTP application: routes, streams and error responses. The only file that imports FastAPI."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

import cb_rollout
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import RolloutError
from cb_rollout.metrics.live_metrics import CONTENT_TYPE, exposition
from cb_rollout.rollout.prompts import Encoded
from cb_rollout.server import protocol
from cb_rollout.server.middleware import AccessMiddleware
from cb_rollout.server.openai import builders
from cb_rollout.server.openai.builders import ResponseBuilder
from cb_rollout.server.openai.responses_body import ResponsesRequest, chat_request
from cb_rollout.server.openai.responses_builder import ResponsesBuilder, in_responses_words
from cb_rollout.server.output_router import Submission
from cb_rollout.server.protocol import ApiError, as_api_error
from cb_rollout.server.rl.weight_updates import WeightUpdates
from cb_rollout.server.served_model import ServedModel
from cb_rollout.server.xinference import BlockRequest, LaunchRequest

# Maximum length of a field's name in an answer: a client may send a name of any length.
MAX_NAME_CHARACTERS = 100

# pydantic's words for a JSON object.
_PYTHONS_OBJECT = re.compile(
    r"a valid dictionary(?: or instance of \w+| or object to extract fields from)?"
)

# pydantic's error types for a field that a body may not have, and for a value that is not one of a
# few allowed words.
EXTRA_FIELD = "extra_forbidden"
OTHER_WORD = "literal_error"

# What to send instead of one of OpenAI's or vLLM's fields, or instead of one of its values.
INSTEAD = {
    "tool_choice": "the model decides whether it calls a tool; ask for the call in a message, or "
    "set response_format",
    "best_of": "send n, and choose among the answers",
    "use_beam_search": "answers are sampled; send n, and choose among them",
    "length_penalty": "it belongs to beam search; leave it out",
    "guided_json": "send response_format",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "chat_template": "the tokenizer's own is used; send token ids to /v1/completions",
}

# FastAPI 0.165's error type for a body that is not JSON.
NOT_JSON = "json_invalid"

# vLLM's header for a client's own name for a request.
ID_HEADER = "x-request-id"

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


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
    )
    _add_error_handlers(app)
    _add_generation(app, served)
    _add_sessions(app, served)
    _add_control(app, served)
    _add_weight_updates(app, served)
    _add_server_info(app, served)
    _add_xinference(app, served)
    _add_inspection(app, served)
    return AccessMiddleware(app, served.options)


def _add_generation(app: FastAPI, served: ServedModel) -> None:
    @app.post("/sessions/{session}/v1/completions", include_in_schema=False)
    @app.post("/v1/completions")
    async def completions(body: protocol.CompletionRequest, request: Request) -> Response:
        """Complete one prompt or several."""
        served.require_known(body.model)
        prompts = await _encoded_prompts(served, body.prompt, body.n or 1)
        params = await served.sampling_params(body, body.model)
        if body.prompt_logprobs is not None and body.stream:
            why = "prompt_logprobs are not streamed; set stream=false."
            raise ApiError(400, why, "prompt_logprobs")
        builder = builders.CompletionResponseBuilder(served, body, prompts, params)
        return await _respond(builder, prompts, params, request)

    @app.post("/sessions/{session}/v1/chat/completions", include_in_schema=False)
    @app.post("/v1/chat/completions")
    async def chat_completions(body: protocol.ChatCompletionRequest, request: Request) -> Response:
        """Answer a chat."""
        served.require_known(body.model)
        _require_consistent(body)
        tools = _plain(body.tools) if body.tool_choice != "none" else None
        chat = await served.encoded(served.encoder.encode_chat, _plain(body.messages), tools)
        params = await served.sampling_params(body, body.model)
        builder = builders.ChatResponseBuilder(served, body, chat, params, tools)
        return await _respond(builder, [chat.prompt], params, request)

    @app.post("/sessions/{session}/v1/responses", include_in_schema=False)
    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation of items, as `/v1/chat/completions` answers a chat."""
        served.require_known(body.model)
        with in_responses_words():
            asked = chat_request(body)
            _require_consistent(asked)
            tools = _plain(asked.tools) if asked.tool_choice != "none" else None
            chat = await served.encoded(served.encoder.encode_chat, _plain(asked.messages), tools)
            params = await served.sampling_params(asked, body.model)
            answer = builders.ChatResponseBuilder(served, asked, chat, params, tools)
            builder = ResponsesBuilder(answer, body, chat)
            return await _respond(builder, [chat.prompt], params, request)

    @app.post("/inference/v1/generate")
    async def generate(body: protocol.TokenRequest, request: Request) -> Response:
        """Continue token ids; answer with token ids, log-probabilities and policy versions."""
        served.require_known(body.model)
        params = await served.sampling_params(body.sampling_params, body.model)
        builder = builders.TokenResponseBuilder(served, body, _client_id(body, request))
        return await _respond(builder, [body.token_ids], params, request)


def _add_sessions(app: FastAPI, served: ServedModel) -> None:
    @app.post("/sessions")
    async def open_session() -> Response:
        """Open a session; pass its `base_url` to an OpenAI client."""
        session = served.sessions.open()
        return _Json({"session": session.id, "base_url": session.base_url})

    @app.get("/sessions/{session}")
    async def read_session(session: str) -> Response:
        """Return the samples of a session so far, and its reward."""
        found = served.sessions.get(session)
        samples = [asdict(sample) for sample in found.trajectory.samples]
        return _Json({"session": session, "reward": found.reward, "samples": samples})

    @app.post("/sessions/{session}/end")
    async def end_session(session: str, body: protocol.EndRequest) -> Response:
        """End a session with its reward."""
        served.sessions.get(session).end(body.reward)
        return _Json({"status": "ended"})

    @app.delete("/sessions/{session}")
    async def close_session(session: str) -> Response:
        """Forget a session that was opened by `/sessions`."""
        served.sessions.get(session)
        served.sessions.close(session)
        return _Json({"status": "closed"})


def _add_control(app: FastAPI, served: ServedModel) -> None:
    @app.post("/pause")
    async def pause(
        mode: Annotated[protocol.PauseMode, Query()] = "abort", clear_cache: bool = True
    ) -> Response:
        """Stop sampling until `/resume`; `mode` decides what happens to requests in flight.

        `clear_cache` changes nothing: keys of older weights are never matched.
        """
        await served.control.pause(mode)
        return _Json({"status": "paused", "policy_version": served.manager.policy_version})

    @app.post("/resume")
    async def resume() -> Response:
        """Continue sampling after `/pause`."""
        await served.control.resume()
        return _Json({"status": "resumed", "policy_version": served.manager.policy_version})

    @app.post("/abort_requests")
    async def abort_requests(body: protocol.AbortRequest | None = None) -> Response:
        """End the requests that clients gave these names; without names, end all requests.

        Each request is answered with its tokens so far and with `finish_reason` "abort".
        """
        count = await served.control.abort(None if body is None else body.request_ids)
        return _Json({"status": "aborted", "aborted": count})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Confirm that no cached key of older weights is matched, which is always true."""
        return _Json({"success": True})


def _add_weight_updates(app: FastAPI, served: ServedModel) -> None:
    def weights() -> WeightUpdates:
        if served.weights is None:
            why = (
                "this server does not accept weight updates; start it with --allow-weight-updates."
            )
            raise ApiError(403, why)
        return served.weights

    @app.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: protocol.InitRequest) -> Response:
        """Join the trainer's group, over which the trainer sends weights."""
        await weights().init(body.init_info)
        return _Json({"message": "Weight transfer initialized"})

    @app.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> Response:
        """Leave the trainer's group."""
        await weights().shutdown()
        return _Json({"message": "Weight transfer shut down"})

    @app.post("/start_weight_update")
    async def start_weight_update(body: protocol.StartRequest | None = None) -> Response:
        """Begin an update."""
        update_id = weights().start(body is not None and body.partial)
        return _Json({"message": "Weight update started", "update_id": update_id})

    @app.post("/update_weights")
    async def update_weights(body: protocol.UpdateRequest) -> Response:
        """Receive tensors of the open update; with `weight_dir` alone, make a whole update."""
        updates = weights()
        if (body.update_info is None) == (body.weight_dir is None):
            raise ApiError(400, "give either update_info or weight_dir.", "update_info")
        if body.weight_dir is not None:
            return _Json({"status": "ok", **await updates.replace(body.weight_dir)})
        assert body.update_info is not None
        count = await updates.add(body.update_info, body.update_id)
        return _Json({"message": "Weights updated", "num_tensors": count})

    @app.post("/finish_weight_update")
    async def finish_weight_update(body: protocol.FinishRequest | None = None) -> Response:
        """Write the update's tensors, under one new policy version."""
        body = body or protocol.FinishRequest()
        report = await weights().finish(body.update_id, body.in_flight, body.weight_version)
        return _Json({"message": "Weight update finished", **report})


def _add_server_info(app: FastAPI, served: ServedModel) -> None:
    @app.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> Response:
        """Return the number of processes that receive weights: one."""
        return _Json({"world_size": 1})

    @app.get("/server_info")
    async def server_info(
        config_format: Annotated[Literal["text", "json"], Query()] = "text",
    ) -> Response:
        """Return the parts of vLLM's configuration that clients read, and the engine's state."""
        manager = served.manager
        config = {
            "model_config": {
                "model": served.options.model_name,
                "served_model_name": served.options.model_name,
                "dtype": str(manager.model.dtype),
                "max_model_len": served.max_model_len,
                "max_logprobs": 20,
                # After the temperature, as TRL's loss recomputes them.
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": dict.fromkeys((*PARALLEL_SIZES, "world_size"), 1),
            "lora_config": None,
            "weight_transfer_config": {"backend": "gloo"} if served.weights else None,
        }
        status = manager.status()
        info = {
            "vllm_config": config if config_format == "json" else str(config),
            "cb_rollout": cb_rollout.__version__,
            "policy_version": manager.policy_version,
            "weight_version": served.weights.weight_version if served.weights else None,
            "is_paused": served.control.is_paused,
            "logprobs_mode": manager.config.logprobs_mode,
            "requests_running": status.requests_running,
            "requests_waiting": status.requests_waiting,
        }
        return _Json(info)

    @app.get("/is_paused")
    async def is_paused() -> Response:
        """Return whether a client paused the engine."""
        return _Json({"is_paused": served.control.is_paused})


def _add_xinference(app: FastAPI, served: ServedModel) -> None:
    """Add the routes that only Xinference's client uses; it also uses OpenAI's routes of models."""

    @app.get("/v1/cluster/auth")
    async def cluster_auth() -> Response:
        """Say whether clients must send a key; Xinference's client sends a key only then."""
        return _Json({"auth": served.options.api_key is not None})

    @app.post("/v1/models")
    async def launch(body: LaunchRequest) -> Response:
        """Give the running model a name; a launch of another model is refused."""
        return _Json({"model_uid": served.launches.launch(body)})

    @app.get("/v1/models/{model:path}/progress")
    async def launch_progress(model: str) -> Response:
        """Say that a launched model is ready."""
        served.require_known(model)
        return _Json({"progress": 1.0})

    @app.delete("/v1/models/{model:path}")
    async def terminate(model: str) -> Response:
        """Forget a launch; the model keeps running until the server ends."""
        served.launches.terminate(model)
        return _Json(None)

    @app.post("/v1/models/{model}/requests/{request_id}/abort")
    async def abort_request(
        model: str, request_id: str, body: BlockRequest | None = None
    ) -> Response:
        """Abort requests with this `request_id`, and for a while also later requests with it."""
        served.require_known(model)
        seconds = (body or BlockRequest()).block_duration
        if seconds:
            served.control.block(request_id, seconds)
        count = await served.control.abort([request_id])
        return _Json({"msg": "DONE" if count else "NOT_FOUND"})


def _add_inspection(app: FastAPI, served: ServedModel) -> None:
    @app.get("/sessions/{session}/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def list_models() -> Response:
        """List the model that is served, under each of its names, and its adapters."""
        cards = [_model_card(served, name) for name in served.names]
        return _Json({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> Response:
        """Describe the served model."""
        served.require_known(model)
        return _Json(_model_card(served, model))

    @app.get("/health")
    async def health() -> Response:
        """Answer 200 if the engine can generate, else 503."""
        served.require_ready()
        return _Json({"status": "ok", "policy_version": served.manager.policy_version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return every metric in Prometheus' text format."""
        manager = served.manager
        text = exposition(manager.counters, manager.status(), manager.durations)
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _model_card(served: ServedModel, name: str) -> dict[str, Any]:
    """Describe the model with OpenAI's, vLLM's and Xinference's fields, under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "cb_rollout",
        "parent": None if served.adapter_of(name) is None else served.options.model_name,
        "max_model_len": served.max_model_len,
        "policy_version": served.manager.policy_version,
        "model_uid": name,
        "model_type": "LLM",
        "model_name": served.options.model_name,
        "model_ability": served.encoder.abilities,
        "model_format": "pytorch",
        "context_length": served.max_model_len,
        "replica": 1,
    }


def _plain(parts: Sequence[protocol.Strict] | None) -> list[dict[str, Any]]:
    return [part.model_dump(exclude_none=True) for part in parts or ()]


async def _encoded_prompts(served: ServedModel, given: Any, n: int) -> list[list[int]]:
    is_single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts = [given] if is_single else given
    served.require_few(len(prompts), n)
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; give at least one token.", "prompt")
    encode = served.encoder.encode_text
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            encoded.append(await served.encoded(encode, prompt))
        else:
            encoded.append(prompt)
    return encoded


def _require_consistent(body: protocol.ChatCompletionRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
    is_free = body.response_format is None or body.response_format.type == "text"
    if body.tools and not is_free:
        why = "response_format and tools exclude each other; leave one out."
        raise ApiError(400, why, "response_format")


async def _respond(
    builder: ResponseBuilder, prompts: Sequence[Encoded], params: SamplingParams, request: Request
) -> Response:
    """Queue the sequences of a request, and answer with their response or their stream."""
    streams = bool(builder.body.stream)
    submission = await builder.model.submit(
        prompts,
        params,
        n=builder.num_choices,
        is_streaming=streams,
        client_id=_client_id(builder.body, request),
        session_id=request.path_params.get("session"),
    )
    builder.begin(submission)
    if streams:
        return _EventStream(_events(builder, submission), submission)
    working = asyncio.ensure_future(_answer(builder, submission))
    leaving = asyncio.ensure_future(_gone(request))
    with submission:
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return _Json(working.result())
            # The client is gone; nobody reads this.
            return Response(status_code=499)
        finally:
            working.cancel()
            leaving.cancel()


async def _answer(builder: ResponseBuilder, submission: Submission) -> dict[str, Any]:
    """Wait for every sequence, and return the response."""
    outputs = {index: output async for index, output in submission.updates()}
    await builder.score_prompts()
    return builder.whole([outputs[index] for index in sorted(outputs)])


def _client_id(body: Any, request: Request) -> str | None:
    return body.request_id or request.headers.get(ID_HEADER)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(builder: ResponseBuilder, submission: Submission) -> AsyncIterator[str]:
    """Yield a stream's events; an error is the last event."""
    try:
        async for chunk in builder.stream(submission.updates()):
            yield _event(chunk)
    except (ApiError, RolloutError, TimeoutError) as error:
        for event in builder.failure(as_api_error(error)):
            yield _event(event)
    yield builder.end_of_stream


def _event(content: dict[str, Any]) -> str:
    """Return a server-sent event, which has a name if its content has a type."""
    name = f"event: {content['type']}\n" if "type" in content else ""
    return f"{name}data: {_dumps(content)}\n\n"


def _dumps(content: Any) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every exception in one shape, without the server's internals."""

    async def answer(_: Request, raised: Exception) -> Response:
        match raised:
            case HTTPException():
                error = ApiError(raised.status_code, f"{raised.detail}.")
            case RequestValidationError():
                error = _of_faults(raised)
            case _:
                error = as_api_error(raised)
        return _Json(error.body, status_code=error.status, headers=error.headers)

    for error_class in (
        ApiError,
        RolloutError,
        TimeoutError,
        RecursionError,
        HTTPException,
        RequestValidationError,
        Exception,
    ):
        app.add_exception_handler(error_class, answer)


def _advice(field: str, fault: str) -> str:
    """Return what to send in place of a refused field; empty if the fault itself says so."""
    if fault == EXTRA_FIELD:
        return INSTEAD.get(field, "this endpoint takes no such field; leave it out")
    if fault == OTHER_WORD:
        return INSTEAD.get(field, "")
    return ""


def _of_faults(error: RequestValidationError) -> ApiError:
    """Return the response for a body with faults; its `param` is the first field at fault."""
    texts = []
    param = None
    for number, fault in enumerate(error.errors()[: protocol.MAX_FAULTS]):
        if fault["type"] == NOT_JSON:
            place = f"{fault['ctx']['error']} at byte {fault['loc'][-1]}"
            return ApiError(400, f"the body is not JSON ({place})")
        names = [f"{name!s:.{MAX_NAME_CHARACTERS}}" for name in fault["loc"]]
        if number == 0 and len(names) > 1:
            param = names[1]
        # pydantic names the alternatives of a list by their types.
        field = ".".join(name for name in names if name != "body" and "[" not in name)
        text = str(fault["msg"]).removeprefix("Value error, ")
        text = _PYTHONS_OBJECT.sub("an object", text)
        if fault["type"] == "none_required":
            text = "may be null alone; leave it out"
        advice = _advice(names[-1], fault["type"])
        if advice:
            text = f"{text}: {advice}"
        texts.append(f"{field}: {text}" if field else text)
    if isinstance(error.body, bytes):
        # FastAPI parses a body only if its header declares JSON; docs/security.md says why.
        texts = [
            "the body is not declared as JSON; send the header Content-Type: application/json."
        ]
    return ApiError(400, "; ".join(texts), param)
