"""Requests generated from the OpenAPI document, valid and invalid, are never answered 500."""

import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from served import TIMEOUT_SECONDS, idle, served

from cb_rollout import RolloutConfig

# For each path and mode.
MAX_EXAMPLES = int(1.5 * float(os.environ.get("CB_ROLLOUT_FUZZ_SECONDS", "8")))


@pytest.fixture(scope="module")
def serving():
    config = RolloutConfig(seed=0, max_queue_size=64)
    limits = {
        "max_prompt_tokens": 64, "max_sequences": 4, "request_timeout_seconds": 0.5,
        "allow_weight_updates": True, "weight_update_timeout_seconds": 0.2,
    }  # fmt: skip
    with served(config, **limits) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_request_makes_the_server_fail(serving, mode):
    generator, server = serving
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen = {}
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            # A request without a body has nothing to be wrong.
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(max_examples=MAX_EXAMPLES, suppress_health_check=list(HealthCheck))
        def answered(case):
            answer = case.call(timeout=TIMEOUT_SECONDS)
            seen.setdefault(case.operation.path, set()).add(answer.status_code)
            if case.operation.path == "/pause":
                assert httpx.post(f"{server.url}/resume").status_code == 200
            if answer.status_code == 503:
                # The time limit is an expected answer, and so is that there is one model.
                said = answer.json()["error"]["message"]
                assert "took longer" in said or "loads no other model" in said
                return
            case.validate_response(answer, checks=[not_a_server_error])
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        answered()
    bodies = {
        "/v1/completions", "/v1/chat/completions", "/inference/v1/generate",
        "/abort_requests", "/init_weight_transfer_engine", "/start_weight_update",
        "/update_weights", "/finish_weight_update", "/v1/responses", "/v1/models",
        "/v1/models/{model}/requests/{request_id}/abort",
    }  # fmt: skip
    assert bodies <= set(seen)
    if mode is GenerationMode.POSITIVE:
        assert set(seen) - bodies == {
            "/v1/models/{model}", "/v1/models/{model}/progress", "/v1/cluster/auth",
            "/health", "/metrics", "/pause", "/resume",
            "/is_paused", "/shutdown_weight_transfer_engine", "/reset_prefix_cache",
            "/get_world_size", "/server_info",
            "/sessions", "/sessions/{session}", "/sessions/{session}/end",
        }  # fmt: skip
        assert 200 in seen["/v1/completions"] | seen["/v1/chat/completions"]
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0
    assert server.is_running()
    server.model.require_ready()
