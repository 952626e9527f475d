"""Bytes that are no requests, or nearly: the process, the engine and a rollout beside it go on.

`CB_ROLLOUT_FUZZ_SECONDS` is the time of each test (8), `CB_ROLLOUT_FUZZ_SEED` the seed (0).
"""

import json
import os
import random
import select
import socket
import threading
import time

import httpx
import pytest
from served import TIMEOUT_SECONDS, idle, served

from cb_rollout import RolloutConfig, SamplingParams

SECONDS = float(os.environ.get("CB_ROLLOUT_FUZZ_SECONDS", "8"))
SEED = int(os.environ.get("CB_ROLLOUT_FUZZ_SEED", "0"))

# Most requests of each test, whatever its time.
MAX_REQUESTS = int(200 * SECONDS)

# Longest wait for an answer to bytes that may be no request.
ANSWER_SECONDS = 0.2

GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6], [7, 8, 9], [200] * 20]

USER = {"role": "user", "content": "a"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,3}$"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BODIES = {
    "/v1/completions": [
        {"prompt": "abc", "max_tokens": 3, "stop": ["x"], "logprobs": 2, "seed": 1},
        {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True, "top_k": 3, "top_p": 0.5},
        {"prompt": [5], "max_tokens": 2, "logit_bias": {"5": 1.5}, "min_p": 0.1, "n": 2},
    ],
    "/v1/chat/completions": [
        {"messages": [USER], "max_tokens": 3, "stream": True, "temperature": 0.7},
        {"messages": [USER], "max_tokens": 3, "tools": [TOOL], "tool_choice": "auto"},
        {"messages": [USER], "max_tokens": 3, "response_format": {
            "type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ],
    "/inference/v1/generate": [
        {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 1}, "stream": True},
    ],
    "/abort_requests": [{"request_ids": ["nobody"]}],
    "/start_weight_update": [{"partial": True}],
    "/update_weights": [{"update_info": {"weight_dir": "/absent"}}],
    "/finish_weight_update": [{"in_flight": "keep"}],
}  # fmt: skip

# Values that break what expects another.
ODD = [
    None, True, 0, -1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, 1e-320, "", "\x00", "\ud800",
    "\x1b[31m", "a" * 5000, [], {}, [[]], [{}] * 200, {"a": {}}, ["a", 1], "(" * 2000, "[" * 2000,
    "^$" * 20, "{1,9999}" * 5, "$ref",
]  # fmt: skip


def odd_body(chance, value):
    """Return a body with a part replaced, dropped, repeated or wrapped."""
    if chance.random() < 0.15:
        return chance.choice([chance.choice(ODD), [value] * chance.randint(0, 3), {"a": value}])
    if isinstance(value, dict) and value:
        changed = dict(value)
        name = chance.choice(list(value))
        if chance.random() < 0.1:
            del changed[name]
        else:
            changed[name] = odd_body(chance, value[name])
        return changed
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], odd_body(chance, value[at]), *value[at + 1 :]]
    return chance.choice(ODD)


def a_request(chance):
    """Return the bytes of a request, valid but maybe for its body."""
    path = chance.choice(list(BODIES))
    body = chance.choice(BODIES[path])
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        body = odd_body(chance, body)
    content = json.dumps(body).encode()
    framing = b"Content-Length: %d\r\n\r\n%s" % (len(content), content)
    if chance.random() < 0.2:
        framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (
            len(content), content,
        )  # fmt: skip
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + framing


END = b"\r\n\r\n"


def changed_bytes(chance, request):
    at = chance.randrange(len(request))
    length, bad_lengths = b"Content-Length: ", [b"-", b"9", b"+"]
    long_header = b"\r\nX: " + b"a" * chance.choice([10, 9000, 80_000]) + END
    return [
        request,
        request[:at],
        request[at:],
        request[:at] + chance.randbytes(chance.randint(1, 40)) + request[at:],
        request[:at] + bytes([request[at] ^ 1 << chance.randrange(8)]) + request[at + 1 :],
        request[:at] + request[at : at + 20] * chance.randint(2, 50) + request[at:],
        chance.randbytes(chance.randint(1, 4000)),
        request.replace(b"\r\n", b"\n"),
        request.replace(b"POST", chance.choice([b"GET", b"PUT", b"OPTIONS", b"BREW", b"\x00"])),
        request.replace(b"HTTP/1.1", chance.choice([b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""])),
        request.replace(b"Host: localhost", b"Host: " + chance.choice([b"a", b"[", b"\xff", b""])),
        request.replace(length, length + chance.choice(bad_lengths)),
        request.replace(END, long_header, 1),
        request.replace(END, b"\r\nX: a" * chance.choice([10, 2000]) + END, 1),
        request.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 1),
        request.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n", 1),
        request.replace(b" /", b" /" + b"%" * chance.choice([1, 9000]), 1),
        request * chance.randint(2, 20),
        request + chance.randbytes(50),
    ][chance.randrange(19)]  # fmt: skip


def send(chance, address, content):
    """Send bytes, at once or in parts; read what comes, or leave without."""
    with socket.create_connection(address, TIMEOUT_SECONDS) as client:
        client.settimeout(ANSWER_SECONDS)
        at = chance.randrange(len(content) + 1) if chance.random() < 0.3 else len(content)
        try:
            client.sendall(content[:at])
            client.sendall(content[at:])
            if chance.random() < 0.2:
                client.shutdown(socket.SHUT_WR)
            if chance.random() < 0.7:
                return client.recv(1 << 16)
            select.select([client], [], [], 0.01)
        except OSError:
            pass
    return b""


class Rollouts:
    """Generate batches in a thread of its own until told to end; keeps those that differ."""

    def __init__(self, generator):
        self._generator = generator
        self.expected, self.wrong, self.num_done = self._tokens(), [], 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _tokens(self):
        outputs = self._generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        return [(output.status, output.generated_tokens) for output in outputs.values()]

    def _run(self):
        while not self._is_over.is_set():
            try:
                if (found := self._tokens()) != self.expected:
                    self.wrong.append(found)
            except Exception as error:  # noqa: BLE001  the test reports it
                self.wrong.append(error)
                return
            self.num_done += 1

    def end(self):
        self._is_over.set()
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()
        assert self.wrong == []
        assert self._tokens() == self.expected
        assert self.num_done


@pytest.fixture(scope="module")
def serving():
    limits = {
        "max_prompt_tokens": 64, "max_sequences": 4, "request_timeout_seconds": 2.0,
        "body_timeout_seconds": 1.0, "allow_weight_updates": True, "max_connections": 32,
        "weight_update_timeout_seconds": 0.2,
    }  # fmt: skip
    with served(RolloutConfig(seed=0, max_queue_size=64), **limits) as pair:
        yield pair


@pytest.mark.slow
@pytest.mark.parametrize("is_raw", [False, True], ids=["bodies", "bytes"])
def test_no_bytes_end_the_server_the_engine_or_a_rollout_beside_them(serving, is_raw, capfd):
    generator, server = serving
    host, port = server.url.removeprefix("http://").split(":")
    chance = random.Random(SEED)
    rollouts = Rollouts(generator)
    answers, deadline = {}, time.monotonic() + SECONDS
    for number in range(MAX_REQUESTS):
        if time.monotonic() > deadline:
            break
        content = a_request(chance)
        if is_raw:
            content = changed_bytes(chance, content)
        answer = send(chance, (host, int(port)), content)
        status = answer.split()[1] if answer.count(b" ") > 1 else b""
        assert status not in (b"500", b"502"), content[:2000]
        answers[status] = answers.get(status, 0) + 1
        assert server.is_running(), (number, content[:2000])
    rollouts.end()
    assert answers.keys() >= {b"200", b"400"}
    health = httpx.get(f"{server.url}/health", timeout=TIMEOUT_SECONDS)
    assert health.json()["status"] == "ok"
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0
    assert "Traceback" not in capfd.readouterr().err
