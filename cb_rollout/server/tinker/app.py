"""The HTTP application of Tinker's API: routes, waiting for results, and error responses."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tinker import types

from cb_rollout.errors import InvalidRequestError
from cb_rollout.server.middleware import AccessMiddleware
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.tinker.jobs import Failure, Job
from cb_rollout.server.tinker.service import TinkerService
from cb_rollout.server.tinker.wire import read_forward_backward

API = "/api/v1"
PROTOBUF = "application/x-protobuf"

# The client asks again after this long. Its own limit is 45 seconds.
WAIT_SECONDS = 20.0


def create_app(service: TinkerService, options: ServerOptions) -> ASGIApp:
    """Create the ASGI application, with access control in front."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = Starlette(
        routes=_routes(_Endpoints(service)),
        lifespan=lifespan,
        exception_handlers={InvalidRequestError: _refusal},
    )
    return BearerKey(AccessMiddleware(app, options))


def _refusal(_: Request, error: Exception) -> Response:
    # After a 400, the client sends the request again; after a 422, it raises the message.
    return JSONResponse({"detail": str(error)}, 422)


class BearerKey:
    """Pass on the client's `X-API-Key` as the bearer token that access control reads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            key = headers.get(b"x-api-key")
            if key is not None and b"authorization" not in headers:
                authorization = (b"authorization", b"Bearer " + key)
                scope = {**scope, "headers": [*scope["headers"], authorization]}
        await self._app(scope, receive, send)


async def _json(request: Request) -> Any:
    try:
        return await request.json()
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no JSON that can be read ({error}).") from error


async def _body(request: Request, kind: type[BaseModel]) -> dict[str, Any]:
    """Return a request's JSON as the client's type reads it, without fields that are None."""
    content = await _json(request)
    try:
        return kind.model_validate(content).model_dump(exclude_none=True)
    except ValidationError as error:
        raise InvalidRequestError(f"the body is no {kind.__name__} ({error}).") from error


async def _field(request: Request, name: str) -> str:
    """Return a field of a request's JSON that has no type in the client."""
    body = await _json(request)
    value = body.get(name) if isinstance(body, dict) else None
    if not isinstance(value, str):
        raise InvalidRequestError(f"the body has no text {name!r}.")
    return value


def _future(job: Job, **more: Any) -> Response:
    return JSONResponse({"request_id": job.id, **more})


class _Endpoints:
    """A method for each route, with the client's name for it."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    async def healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def get_server_capabilities(self, _: Request) -> Response:
        limits = self._service.policies.generator.manager.limits
        model = {
            "model_name": self._service.model_name,
            "max_context_length": limits.max_positions,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def client_config(self, _: Request) -> Response:
        return JSONResponse({"pjwt_auth_enabled": False, "credential_default_source": "api_key"})

    async def dynamic_config(self, _: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(self, _: Request) -> Response:
        # Telemetry is not stored.
        return JSONResponse({"status": "accepted"})

    async def create_session(self, request: Request) -> Response:
        await _body(request, types.CreateSessionRequest)
        session_id = self._service.create_session()
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def session_heartbeat(self, request: Request) -> Response:
        body = await _body(request, types.SessionHeartbeatRequest)
        self._service.require_session(body["session_id"])
        return JSONResponse({"type": "session_heartbeat"})

    async def finish_session(self, request: Request) -> Response:
        self._service.finish_session(request.path_params["session_id"])
        return JSONResponse({"status": "ok"})

    async def create_model(self, request: Request) -> Response:
        return _future(self._service.create_model(await _body(request, types.CreateModelRequest)))

    async def unload_model(self, request: Request) -> Response:
        return _future(self._service.unload_model(await _body(request, types.UnloadModelRequest)))

    async def get_info(self, request: Request) -> Response:
        body = await _body(request, types.GetInfoRequest)
        lora = self._service.lora_of_run(body["model_id"])
        name = self._service.model_name
        answer = {
            "type": "get_info",
            "model_id": body["model_id"],
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": name},
            "is_lora": True,
            "lora_rank": lora.rank,
            "model_name": name,
        }
        return JSONResponse(answer)

    async def forward_backward(self, request: Request) -> Response:
        asked = read_forward_backward(await request.body())
        return _future(self._service.forward_backward(asked))

    async def optim_step(self, request: Request) -> Response:
        return _future(self._service.optim_step(await _body(request, types.OptimStepRequest)))

    async def save_weights(self, request: Request) -> Response:
        return _future(self._service.save_weights(await _body(request, types.SaveWeightsRequest)))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        body = await _body(request, types.SaveWeightsForSamplerRequest)
        return _future(self._service.save_weights_for_sampler(body))

    async def load_weights(self, request: Request) -> Response:
        return _future(self._service.load_weights(await _body(request, types.LoadWeightsRequest)))

    async def weights_info(self, request: Request) -> Response:
        path = await _field(request, "tinker_path")
        checkpoint = await asyncio.to_thread(self._service.store.load, path)
        lora = checkpoint.lora
        answer = {
            "base_model": self._service.model_name,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }
        return JSONResponse(answer)

    async def create_sampling_session(self, request: Request) -> Response:
        body = await _body(request, types.CreateSamplingSessionRequest)
        session_id = self._service.create_sampling_session(body)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": session_id})

    async def get_sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        answer = {
            "sampler_id": sampler_id,
            "base_model": self._service.model_name,
            "model_path": self._service.path_of_sampler(sampler_id),
        }
        return JSONResponse(answer)

    async def asample(self, request: Request) -> Response:
        job, sequence_ids = self._service.sample(await _body(request, types.SampleRequest))
        return _future(job, sample_sequence_ids=sequence_ids)

    async def retrieve_future(self, request: Request) -> Response:
        body = await _body(request, types.FutureRetrieveRequest)
        job = self._service.jobs.get(body["request_id"])
        if job is None:
            # The client then sends the request itself again.
            return JSONResponse({"detail": f"request {body['request_id']} is forgotten."}, 410)
        waiting = asyncio.wrap_future(job.result)
        done, _ = await asyncio.wait([waiting], timeout=WAIT_SECONDS)
        if not done:
            return JSONResponse(
                {"type": "try_again", "request_id": job.id, "queue_state": "active"}
            )
        result = waiting.result()
        if isinstance(result, Failure):
            category = "user" if result.is_users else "server"
            return JSONResponse({"error": result.message, "category": category})
        if isinstance(result, bytes):
            return Response(result, media_type=PROTOBUF)
        return JSONResponse(result)

    async def cancel_future(self, request: Request) -> Response:
        self._service.jobs.cancel(await _field(request, "request_id"))
        return JSONResponse({"status": "ok"})


def _routes(endpoints: _Endpoints) -> list[Route]:
    """Return the routes, at the client's paths."""
    posts = {
        "client/config": endpoints.client_config,
        "client/dynamic_config": endpoints.dynamic_config,
        "telemetry": endpoints.telemetry,
        "create_session": endpoints.create_session,
        "session_heartbeat": endpoints.session_heartbeat,
        "sessions/{session_id}/finish": endpoints.finish_session,
        "create_model": endpoints.create_model,
        "unload_model": endpoints.unload_model,
        "get_info": endpoints.get_info,
        "forward_backward": endpoints.forward_backward,
        "optim_step": endpoints.optim_step,
        "save_weights": endpoints.save_weights,
        "save_weights_for_sampler": endpoints.save_weights_for_sampler,
        "load_weights": endpoints.load_weights,
        "weights_info": endpoints.weights_info,
        "create_sampling_session": endpoints.create_sampling_session,
        "asample": endpoints.asample,
        "retrieve_future": endpoints.retrieve_future,
        "cancel_future": endpoints.cancel_future,
    }
    gets = {
        "healthz": endpoints.healthz,
        "get_server_capabilities": endpoints.get_server_capabilities,
        "samplers/{sampler_id}": endpoints.get_sampler,
    }
    routes = [Route(f"{API}/{path}", answer, methods=["POST"]) for path, answer in posts.items()]
    routes += [Route(f"{API}/{path}", answer, methods=["GET"]) for path, answer in gets.items()]
    return routes
