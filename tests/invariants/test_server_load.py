"""Many concurrent clients, malformed requests, and weights that change meanwhile."""

import asyncio
import http.client
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import torch
from served import IDS, TIMEOUT_SECONDS, client, idle, served
from tiny import byte_tokenizer, plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, SamplingParams

NUM_STREAMS = 200
TOKENIZER = byte_tokenizer()
LONG = {"ignore_eos": True, **IDS}


@pytest.fixture(scope="module")
def serving():
    config = RolloutConfig(seed=0, block_size=16, max_queue_size=400)
    with served(config, max_body_bytes=1 << 16) as (generator, server):
        yield generator, server


@pytest.fixture
def server(serving):
    generator, server = serving
    yield server
    # Whatever was done to it, it serves, and nothing is left.
    assert complete(server).choices[0].text is not None
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0


def complete(server, **settings):
    settings = {"prompt": [5, 6], "max_tokens": 2, **settings}
    return client(server).completions.create(model="policy", **settings)


def post(server, content, path="/v1/completions", **headers):
    headers = {"content-type": "application/json", **headers}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)


@pytest.mark.slow
def test_each_of_200_streams_gets_its_own_tokens_as_generate_batch_gives_them(serving, server):
    generator, _ = serving
    prompts = [[3 + n % 250, 3 + n // 250, *range(5, 5 + n % 17)] for n in range(NUM_STREAMS)]
    params = [
        SamplingParams(seed=n, max_new_tokens=10 + n % 23, ignore_eos=True)
        for n in range(NUM_STREAMS)
    ]

    async def stream(chats, n):
        chunks = await chats.completions.create(
            model="policy", prompt=prompts[n], seed=n, max_tokens=10 + n % 23, stream=True,
            logprobs=0, extra_body=LONG,
        )  # fmt: skip
        choices = [chunk.choices[0] async for chunk in chunks]
        tokens = [token for choice in choices for token in choice.token_ids]
        logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
        return tokens, logprobs, "".join(choice.text for choice in choices)

    async def all_streams():
        async with openai.AsyncOpenAI(
            base_url=server.base_url, api_key="x", timeout=TIMEOUT_SECONDS, max_retries=0
        ) as chats:
            return await asyncio.gather(*(stream(chats, n) for n in range(NUM_STREAMS)))

    streamed = asyncio.run(all_streams())
    outputs = generator.generate_batch(prompts, sampling_params=params).values()
    for (tokens, logprobs, text), output in zip(streamed, outputs, strict=True):
        assert tokens == output.generated_tokens
        assert logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert text == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_the_queue_is_bounded(serving, server):
    generator, _ = serving
    with generator.manager.pause():
        waiting = []
        for _ in range(4):
            thread = threading.Thread(target=complete, args=(server,), kwargs={"n": 100})
            thread.start()
            waiting.append(thread)
        while (
            len(generator.manager.loop._inbox) + generator.manager.engine.status().requests_waiting
            < 400
        ):
            time.sleep(0.01)
        with pytest.raises(openai.RateLimitError, match="max_queue_size=400") as caught:
            complete(server)
        assert caught.value.response.headers["retry-after"] == "1"
    for thread in waiting:
        thread.join()


def test_equal_prompts_of_many_clients_are_computed_once(serving, server):
    generator, _ = serving
    loop, counters = generator.manager.loop, generator.manager.counters
    prompt = [9, 8, 7, 6, 5, 4, 3]
    with generator.manager.pause():
        before = counters.copy()
        arguments = {"prompt": prompt, "max_tokens": 4}
        clients = [
            threading.Thread(target=complete, args=(server,), kwargs=arguments) for _ in range(8)
        ]
        for thread in clients:
            thread.start()
        while len(loop._inbox) < 8:
            time.sleep(0.01)
    for thread in clients:
        thread.join()
    assert counters.since(before).prefill_tokens == len(prompt)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{bad", "the body is not JSON ("),
        (b"", "required"),
        (b"[1, 2]", "Input should be an object"),
        (b"null", "Input should be an object"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": "a", "max_tokens": "5"}', "valid integer"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "valid integer"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e400}', "temperature"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "parsing"),
        (b'{"prompt": "\\ud800"}', "valid Unicode"),
        (b'{"prompt": "a", "\\ud800": 1}', "valid string"),
        (b'{"prompt": ' + b"[" * 30000 + b"}", "parsing"),
        (b'{"prompt": "a", "stop": ["a", ""]}', "stop"),
        (b'{"prompt": [true, false]}', "prompt"),
        (b'{"prompt": [-1]}', "vocabulary"),
        (b'{"prompt": [[5], []]}', "empty"),
        (b'{"prompt": "a", "heat": 1}', "heat"),
        (b"\xff\xfe\x00", "body"),
    ],
)
def test_a_malformed_body_is_answered_400_in_openais_shape(server, content, said):
    answer = post(server, content)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["", "text/plain"])
def test_a_body_that_is_not_declared_as_json_is_answered_400_which_says_so(server, kind):
    answer = post(server, b'{"prompt": "a"}', **{"content-type": kind})
    assert answer.status_code == 400
    assert "header Content-Type: application/json" in answer.json()["error"]["message"]


def test_another_path_or_method_is_an_error_in_the_same_shape(server):
    assert httpx.get(f"{server.url}/v1/files").json()["error"]["type"] == "not_found_error"
    answer = httpx.get(f"{server.url}/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (405, "Method Not Allowed.")
    for path in ("/docs", "/redoc"):
        assert httpx.get(f"{server.url}{path}").status_code == 404


def test_a_huge_body_is_refused_declared_or_not(server):
    answer = post(server, b" " * (1 << 17))
    assert answer.status_code == 413
    assert "65,536 bytes" in answer.json()["error"]["message"]
    answer = post(server, (b" " * 1024 for _ in range(100)))
    assert answer.status_code == 413


def raw(server, data):
    address = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((address[0], int(address[1])), timeout=30)
    connection.sendall(data)
    return connection


HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_body_that_does_not_arrive_is_answered_400_after_the_time_limit():
    half = HEADERS + b'Content-Length: 100\r\n\r\n{"prompt"'
    with (
        served(body_timeout_seconds=1.0) as (_, server),
        raw(server, half) as connection,
        http.client.HTTPResponse(connection) as answer,
    ):
        answer.begin()
        assert answer.status == 400
        assert "did not arrive within 1 s" in json.loads(answer.read())["error"]["message"]


def test_clients_that_disconnect_at_any_point_leave_no_request(serving, server):
    body = json.dumps(
        {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 8}
    ).encode()
    request = HEADERS + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for size in (10, len(HEADERS), len(request) - 5, len(request)):
        raw(server, request[:size]).close()
    quiet = request.replace(b'"stream": true', b'"stream": null')
    raw(server, quiet.replace(b": null", b":false")).close()
    # Reads a little and goes away; reads nothing, and stays.
    with raw(server, request) as connection:
        assert connection.recv(64)
    with raw(server, request):
        complete(server)


def test_a_server_without_a_key_refuses_other_host_names(server):
    # What a web page does that gives its own name this machine's address.
    assert httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}).status_code == 401
    for name in ("localhost:80", "127.0.0.1", "[::1]:8000"):
        assert httpx.get(f"{server.url}/v1/models", headers={"host": name}).status_code == 200


def test_a_server_with_a_key_refuses_every_other_key():
    with served(api_key="s3cret") as (_, server):
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "policy_version": 0}
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                answer = httpx.get(f"{server.url}{path}", headers=header)
                assert answer.status_code == 401
                assert "s3cret" not in answer.text
        assert client(server, api_key="s3cret").models.list().data
        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
            client(server, api_key="s3cre").models.list()
        assert "s3cret" not in repr(server.model.options)


def test_a_request_that_takes_too_long_is_ended():
    with served(request_timeout_seconds=0.5) as (generator, server):
        with pytest.raises(openai.InternalServerError, match="took longer") as caught:
            complete(server, prompt="x", max_tokens=4000, n=64, extra_body=LONG)
        assert caught.value.status_code == 503
        stream = complete(server, max_tokens=4000, n=64, extra_body=LONG, stream=True)
        with pytest.raises(openai.APIError, match="took longer"):
            list(stream)
        assert idle(generator)


def test_a_dead_engine_is_unhealthy_until_it_is_started_anew(monkeypatch):
    with served() as (generator, server):
        step = generator.manager.engine.step

        def dies():
            raise RuntimeError("a secret path")

        monkeypatch.setattr(generator.manager.engine, "step", dies)
        for stream in (False, True):
            with pytest.raises(openai.APIError, match="the engine stopped") as caught:
                list(complete(server, stream=stream))
            assert "secret" not in str(caught.value)
            assert httpx.get(f"{server.url}/health").status_code == 503
            if not stream:
                generator.manager.start()
                assert httpx.get(f"{server.url}/health").status_code == 200
        monkeypatch.setattr(generator.manager.engine, "step", step)
        generator.manager.start()
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert complete(server).choices


def test_closing_ends_what_is_in_flight_with_an_answer():
    with served() as (generator, server):
        stream = complete(server, max_tokens=4000, n=8, extra_body=LONG, stream=True)
        next(iter(stream))
        generator.close()
        with pytest.raises(openai.APIError, match="cancelled by the server"):
            list(stream)
        assert not server.is_running()
        server.close()


class Trainer:
    """Changes a model's weights while clients talk to it, and remembers every version."""

    def __init__(self, model):
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.versions = [self._weights()]

    def _weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def update(self, generator):
        ids = torch.randint(3, 250, (2, 16))
        self.model(input_ids=ids).logits.square().mean().backward()
        with generator.manager.pause():
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.versions.append(self._weights())

    def logprobs(self, version, before, tokens):
        self.model.load_state_dict(self.versions[version])
        return plain_logprobs(self.model, before, tokens)


class Talkers:
    """Clients that ask one thing after another, until they are told to stop."""

    def __init__(self, server, number):
        self.answers, self.failures = [], []
        self._is_done = threading.Event()
        self._threads = [
            threading.Thread(target=self._talk, args=(client(server), n)) for n in range(number)
        ]

    def _talk(self, openai_client, number):
        message = {"role": "user", "content": f"Hello from {number}"}
        while not self._is_done.is_set() and not self.failures:
            try:
                answer = openai_client.chat.completions.create(
                    model="policy", messages=[message], max_tokens=48, logprobs=True,
                    extra_body=LONG,
                )  # fmt: skip
                self.answers.append(answer)
            except openai.APIError as error:
                self.failures.append(error)

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_done.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.slow
def test_weights_change_under_load_and_every_token_is_its_versions():
    torch.manual_seed(0)
    num_updates = 20
    trainer = Trainer(tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=4096))
    with served(model=trainer.model) as (generator, server):
        with Talkers(server, 4) as talkers:
            counters = generator.manager.counters
            for _ in range(num_updates):
                wanted = len(talkers.answers) + 2
                # Both may have ended just before the weights changed.
                num_tokens = counters.tokens_generated
                while not talkers.failures and (
                    len(talkers.answers) < wanted or counters.tokens_generated == num_tokens
                ):
                    time.sleep(0.005)
                trainer.update(generator)
        assert not talkers.failures
        assert generator.policy_version == num_updates
    choices = [(answer.prompt_token_ids, answer.choices[0]) for answer in talkers.answers]
    versions = {version for _, choice in choices for version, _ in choice.policy_versions}
    assert versions >= set(range(num_updates))
    assert any(len(choice.policy_versions) > 1 for _, choice in choices)
    for prompt_ids, choice in choices[:: max(1, len(choices) // 40)]:
        assert sum(count for _, count in choice.policy_versions) == 48
        done = 0
        for version, count in choice.policy_versions:
            before = [*prompt_ids, *choice.token_ids[:done]]
            tokens = choice.token_ids[done : done + count]
            told = [entry.logprob for entry in choice.logprobs.content[done : done + count]]
            assert told == pytest.approx(trainer.logprobs(version, before, tokens), abs=1e-5)
            done += count


def test_log_probabilities_that_are_not_kept_are_refused():
    with served(RolloutConfig(return_logprobs=False)) as (_, server):
        assert complete(server).choices
        with pytest.raises(openai.BadRequestError, match="keeps no log-probabilities"):
            complete(server, logprobs=0)
