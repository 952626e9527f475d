"""Pause, resume and abort over HTTP."""

import asyncio
import threading
import time

import httpx
import pytest
from served import (
    IDS,
    TIMEOUT_SECONDS,
    Asked,
    client,
    idle,
    num_sampled,
    num_waiting,
    running,
    served,
    until,
)  # fmt: skip
from tiny import plain_logprobs

from cb_rollout import RolloutError
from cb_rollout.server.output_router import EngineControl


@pytest.fixture(scope="module")
def serving():
    with served() as (generator, server):
        yield generator, server


@pytest.fixture
def post(serving):
    generator, server = serving

    def send(path, body=None, **params):
        return httpx.post(f"{server.url}{path}", json=body, params=params, timeout=TIMEOUT_SECONDS)

    yield send
    assert send("/resume").json()["status"] == "resumed"
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0


def test_a_request_is_aborted_by_its_clients_name_with_the_tokens_it_has(serving, post):
    generator, _ = serving
    mine, other = Asked(post, "mine"), Asked(post, "other", max_tokens=60)
    running(generator, 2)
    assert post("/abort_requests", {"request_ids": ["mine", "nobody"]}).json()["aborted"] == 1
    choice = mine.choice()
    assert choice["finish_reason"] == "abort"
    tokens = choice["token_ids"]
    assert 0 < len(tokens) < 2000
    plain = plain_logprobs(generator.manager.model, [5, 6], tokens)
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(plain, abs=1e-5)
    assert other.choice()["finish_reason"] == "length"


def test_all_requests_are_aborted_when_none_is_named(serving, post):
    generator, _ = serving
    asked = [Asked(post, f"r{n}") for n in range(3)]
    running(generator, 3)
    # A client whose list is empty names none, and ends nobody's requests.
    assert post("/abort_requests", {"request_ids": []}).json()["aborted"] == 0
    assert post("/abort_requests").json()["aborted"] == 3
    assert {each.choice()["finish_reason"] for each in asked} == {"abort"}


def test_the_openai_client_names_its_requests_in_the_body_or_a_header(serving, post):
    _, server = serving
    asked = {"model": "policy", "prompt": [5], "max_tokens": 2000, "n": 2}
    own = {"ignore_eos": True, **IDS}
    for name in ({"extra_body": {**own, "request_id": "x"}},
                 {"extra_body": own, "extra_headers": {"X-Request-Id": "x"}}):  # fmt: skip
        stream = client(server).completions.create(stream=True, **asked, **name)
        next(iter(stream))
        assert post("/abort_requests", {"request_ids": ["x"]}).json()["aborted"] == 1
        reasons = [c.choices[0].finish_reason for c in stream if c.choices]
        assert [reason for reason in reasons if reason] == ["abort", "abort"]


def test_a_pause_blocks_new_tokens_and_resume_goes_on(serving, post):
    generator, server = serving
    asked = Asked(post, "kept", max_tokens=120, seed=4)
    running(generator, 1)
    assert post("/pause", mode="keep").json()["status"] == "paused"
    before = num_sampled(generator)
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    later = Asked(post, "later", max_tokens=5)
    until(lambda: num_waiting(generator))
    with pytest.raises(RolloutError, match="POST /resume first"):
        generator.generate_batch([[5]], max_new_tokens=2)
    time.sleep(0.05)
    assert num_sampled(generator) == before
    assert post("/resume").json()["status"] == "resumed"
    assert len(asked.choice()["token_ids"]) == 120
    assert len(later.choice()["token_ids"]) == 5
    whole = Asked(post, "whole", max_tokens=120, seed=4)
    assert whole.choice()["token_ids"] == asked.choice()["token_ids"]


def test_a_paused_request_is_aborted_at_once(serving, post):
    generator, _ = serving
    asked = Asked(post, "kept")
    running(generator, 1)
    post("/pause", mode="keep")
    waiting = Asked(post, "waiting")
    until(lambda: num_waiting(generator))
    assert post("/abort_requests").json()["aborted"] == 2
    assert asked.choice()["finish_reason"] == "abort"
    assert waiting.choice()["token_ids"] == []


def test_a_pause_aborts_what_runs_by_default(serving, post):
    generator, _ = serving
    asked = Asked(post, "ended")
    running(generator, 1)
    assert post("/pause").status_code == 200
    choice = asked.choice()
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"]


def test_a_clients_pause_and_sleep_end_each_by_its_own(serving, post):
    generator, _ = serving
    post("/pause")
    generator.sleep()
    asked = Asked(post, "patient", max_tokens=3)
    until(lambda: num_waiting(generator))
    post("/resume")
    assert num_waiting(generator) == 1
    post("/pause", mode="keep")
    generator.wake()
    assert num_waiting(generator) == 1
    post("/resume")
    assert len(asked.choice()["token_ids"]) == 3


def test_an_unknown_mode_is_refused(post):
    answer = post("/pause", mode="wait")
    assert answer.status_code == 400
    assert "mode" in answer.json()["error"]["message"]


def test_a_page_of_a_web_site_cannot_pause_the_engine(serving):
    _, server = serving
    for origin, status in [("https://site.example", 401), ("null", 401), ("http://[", 401),
                           ("http://localhost:3000", 200)]:  # fmt: skip
        answer = httpx.post(f"{server.url}/resume", headers={"origin": origin})
        assert answer.status_code == status


def test_the_server_tells_what_clients_of_vllm_read(serving):
    _, server = serving
    info = httpx.get(f"{server.url}/server_info", params={"config_format": "json"}).json()
    config = info["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == server.model.max_model_len
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["weight_transfer_config"] is None
    assert (info["policy_version"], info["is_paused"]) == (0, False)
    assert isinstance(httpx.get(f"{server.url}/server_info").json()["vllm_config"], str)
    assert httpx.get(f"{server.url}/get_world_size").json() == {"world_size": 1}
    assert httpx.post(f"{server.url}/reset_prefix_cache").json() == {"success": True}


def test_the_server_leaves_no_pause_behind():
    with served() as (generator, server):
        httpx.post(f"{server.url}/pause")
        server.close()
        assert len(generator.generate_batch([[5]], max_new_tokens=2)) == 1


def test_a_resume_ends_a_pause_that_its_client_gave_up():
    async def give_up(control, holder_ends):
        pausing = asyncio.ensure_future(control.pause("keep"))
        await asyncio.sleep(0)
        pausing.cancel()
        resuming = asyncio.ensure_future(control.resume())
        await asyncio.sleep(0)
        holder_ends.set()
        await resuming

    def hold(manager, is_held, ends):
        with manager.loop.paused():
            is_held.set()
            ends.wait(TIMEOUT_SECONDS)

    with served() as (generator, _):
        manager, is_held, ends = generator.manager, threading.Event(), threading.Event()
        control = EngineControl(manager, None)
        # The pause waits for this one, longer than its client does.
        holder = threading.Thread(target=hold, args=(manager, is_held, ends))
        holder.start()
        is_held.wait(TIMEOUT_SECONDS)
        asyncio.run(give_up(control, ends))
        holder.join(TIMEOUT_SECONDS)
        control._thread.shutdown(wait=True)
        assert not manager.pauses.reasons
        assert len(generator.generate_batch([[5]], max_new_tokens=2)) == 1


def test_a_pause_that_waits_does_not_outlive_its_server():
    async def end_while_it_waits(control):
        pausing = asyncio.ensure_future(control.pause("keep"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        control.stop()
        return pausing

    with served() as (generator, _):
        manager = generator.manager
        control = EngineControl(manager, None)
        loop = asyncio.new_event_loop()
        with manager.loop.paused():
            pausing = loop.run_until_complete(end_while_it_waits(control))
        control._thread.shutdown(wait=True)
        pausing.cancel()
        loop.run_until_complete(asyncio.gather(pausing, return_exceptions=True))
        loop.close()
        assert not manager.pauses.reasons
