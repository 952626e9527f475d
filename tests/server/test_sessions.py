"""A session keeps the tokens of each answer to an agent, as the engine sampled them."""

import httpx
import openai
import pytest
from served import IDS, TIMEOUT_SECONDS, served
from tiny import plain_logprobs

from cb_rollout import RolloutError
from cb_rollout.server import sessions


@pytest.fixture(scope="module")
def serving():
    with served() as (generator, server):
        yield generator, server


def agent_of(base_url):
    return openai.OpenAI(base_url=base_url, api_key="none", timeout=TIMEOUT_SECONDS, max_retries=0)


def said(content, role="user"):
    return {"role": role, "content": content}


def answer(client, messages, **more):
    return client.chat.completions.create(
        model="policy", messages=messages, max_tokens=5, extra_body=IDS, **more
    )


def test_turns_of_a_session_are_one_sample_token_by_token(serving):
    generator, server = serving
    with server.session() as session, agent_of(session.base_url) as client:
        messages, responses = [said("hi")], []
        for turn in range(3):
            responses.append(answer(client, messages))
            content = responses[-1].choices[0].message.content
            messages += [said(content, "assistant"), said(f"and {turn}?")]
        session.end(0.5)
        assert session.wait(0.0) == 0.5
        assert answer(client, messages).choices
    samples = session.trajectory.samples
    assert len(session.outputs) == 3
    for output, response in zip(session.outputs, responses, strict=True):
        assert output.generated_tokens == response.choices[0].token_ids
        assert output.prompt_ids == response.prompt_token_ids
    sampled = [t for s in samples for t, own in zip(s.token_ids, s.is_sampled, strict=True) if own]
    assert sampled == [t for output in session.outputs for t in output.generated_tokens]
    for sample in samples:
        ids, first = sample.token_ids, sample.is_sampled.index(True)
        expected = plain_logprobs(generator.manager.model, ids[:first], ids[first:])
        for own, value, wanted in zip(
            sample.is_sampled[first:], sample.logprobs[first:], expected, strict=True
        ):
            assert not own or value == pytest.approx(wanted, abs=1e-5)


def test_streams_branches_and_texts_are_recorded(serving):
    _, server = serving
    with server.session() as session, agent_of(session.base_url) as client:
        stream = answer(client, [said("a")], stream=True)
        streamed = [
            t
            for chunk in stream
            for c in chunk.choices
            for t in getattr(c, "token_ids", None) or ()
        ]
        assert session.outputs[0].generated_tokens == streamed
        answer(client, [said("b")], n=2)
        client.completions.create(model="policy", prompt="text", max_tokens=4)
        assert client.models.list().data[0].id == "policy"
    assert len(session.outputs) == 4
    # Two answers to one chat are two branches, and every other call here begins anew.
    assert len(session.trajectory.samples) == 4


def test_an_interleaved_branch_goes_on_where_it_was(serving):
    _, server = serving
    with server.session() as session, agent_of(session.base_url) as client:
        chats = [[said("first")], [said("second")]]
        for _ in range(2):
            for chat in chats:
                content = answer(client, chat).choices[0].message.content
                chat += [said(content, "assistant"), said("go on")]
    samples = session.trajectory.samples
    assert len(session.outputs) == 4
    assert sum(sum(sample.is_sampled) for sample in samples) == 4 * 5
    assert len(samples) == 2


def test_a_session_over_http_is_opened_read_ended_and_closed(serving):
    _, server = serving

    def send(method, path, **body):
        return httpx.request(method, f"{server.url}{path}", timeout=TIMEOUT_SECONDS, **body)

    opened = send("POST", "/sessions").json()
    path = f"/sessions/{opened['session']}"
    assert opened["base_url"] == f"{server.url}{path}/v1"
    with agent_of(opened["base_url"]) as client:
        tokens = answer(client, [said("hi")]).choices[0].token_ids
    for wrong in ({}, {"reward": "much"}, {"reward": None}, {"reward": 1, "more": 2}):
        assert send("POST", f"{path}/end", json=wrong).status_code == 400
    assert send("POST", f"{path}/end", content='{"reward": NaN}').status_code == 400
    assert send("GET", path).json()["reward"] is None
    assert send("POST", f"{path}/end", json={"reward": 1}).json() == {"status": "ended"}
    (sample,) = (found := send("GET", path).json())["samples"]
    assert found["reward"] == 1.0
    assert sample["token_ids"][-len(tokens) :] == tokens
    assert sum(sample["is_sampled"]) == len(tokens)
    assert send("DELETE", path).json() == {"status": "closed"}
    for method, ended in (("GET", path), ("DELETE", path), ("POST", f"{path}/end")):
        body = {"json": {"reward": 1}} if method == "POST" else {}
        assert send(method, ended, **body).status_code == 404
    body = {"messages": [said("hi")]}
    assert send("POST", f"{path}/v1/chat/completions", json=body).status_code == 404


def test_open_sessions_are_bounded(serving, monkeypatch):
    _, server = serving
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 1)
    with server.session():
        assert httpx.post(f"{server.url}/sessions").status_code == 429
    assert httpx.post(f"{server.url}/sessions").status_code == 200


def test_a_reward_that_never_comes_is_an_error(serving):
    _, server = serving
    with server.session() as session, pytest.raises(RolloutError, match=r"no reward in 0\.01 s"):
        session.wait(0.01)


def test_sessions_need_the_servers_key():
    with served(api_key="secret") as (_, server):
        assert httpx.post(f"{server.url}/sessions").status_code == 401
        with server.session() as session:
            with agent_of(session.base_url) as client, pytest.raises(openai.AuthenticationError):
                answer(client, [said("hi")])
            assert session.outputs == []
