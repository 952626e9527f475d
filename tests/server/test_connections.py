"""Connections that send no whole request, or do not read: few at a time, and not for long."""

import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from served import TIMEOUT_SECONDS, served, until

from cb_rollout import ConfigurationError
from cb_rollout.server import ServerOptions
from cb_rollout.server.handle import max_connections

WAIT_SECONDS = 0.3
MOST = 8
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def serving():
    with served(body_timeout_seconds=WAIT_SECONDS, max_connections=MOST) as pair:
        yield pair


@contextmanager
def connection(server):
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), TIMEOUT_SECONDS) as client:
        yield client


def is_closed(client):
    """Wait for the server to close a connection; what it sent before is dropped."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def open_connections(server):
    return server._server.server_state.connections


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HEALTH + b"GET", HEAD + b"X: " + b"a" * 70_000])
def test_a_connection_without_a_whole_head_is_closed(serving, sent):
    with connection(serving[1]) as client:
        client.sendall(sent)
        assert is_closed(client)


def test_a_head_that_arrives_byte_by_byte_is_closed(serving):
    with connection(serving[1]) as client:
        client.setblocking(False)

        def has_ended():
            try:
                client.send(b"a")
                return client.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionError:
                return True

        until(has_ended)


def test_a_body_that_does_not_arrive_is_answered_400(serving):
    with connection(serving[1]) as client:
        client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        assert is_closed(client)


@pytest.mark.parametrize("length", ["9" * 5000, "9" * 20, "+5", "\u00b2", "1_0", "-1"])
def test_a_length_that_is_none_is_refused(serving, length, caplog):
    with connection(serving[1]) as client:
        client.sendall(HEAD + f"Content-Length: {length}\r\n\r\n[]".encode("latin-1"))
        assert client.recv(1 << 16).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert not any(record.exc_info for record in caplog.records)


def test_garbage_in_a_body_closes_the_connection_without_a_traceback(serving, caplog):
    _, server = serving
    # Refused at once, so the answer follows that to the garbage.
    head = HEAD.replace(b"localhost", b"example.com") + b"Transfer-Encoding: chunked\r\n\r\n"
    for garbage in (b"z\r\n", b"5\r\nabcdefgh\r\n", b"-1\r\n"):
        with connection(server) as client:
            client.sendall(head + garbage)
            assert is_closed(client)
    until(lambda: not server._server.server_state.tasks)
    assert not any(record.exc_info for record in caplog.records)


def test_a_client_that_does_not_take_its_answer_is_closed():
    limits = {"body_timeout_seconds": WAIT_SECONDS, "request_timeout_seconds": WAIT_SECONDS}
    body = b'{"prompt": "%s", "max_tokens": 1, "n": 64, "return_token_ids": true}' % (b"a" * 4000)
    with served(**limits) as (_, server), connection(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        client.sendall(request * 4)
        until(lambda: not open_connections(server))


def test_whole_requests_of_one_connection_are_answered(serving):
    with connection(serving[1]) as client:
        for _ in range(3):
            client.sendall(HEALTH * 2)
            until(lambda: client.recv(1 << 16, socket.MSG_PEEK).count(b"200 OK") == 2)
            client.recv(1 << 16)


def test_one_connection_too_many_closes_the_one_that_waits_longest_for_a_head():
    with served(max_connections=MOST) as (_, server), ExitStack() as opened:
        clients = [opened.enter_context(connection(server)) for _ in range(5 * MOST)]
        for client in clients[:-MOST]:
            assert is_closed(client)
        assert len(open_connections(server)) <= MOST
        assert httpx.get(f"{server.url}/health", timeout=TIMEOUT_SECONDS).status_code == 200


def test_the_number_of_connections_stays_below_the_files_that_may_be_opened():
    assert 1 <= max_connections(ServerOptions()) <= 1024
    assert max_connections(ServerOptions(max_connections=7)) == 7
    with pytest.raises(ConfigurationError, match=r"max_connections=.* raise ulimit -n"):
        max_connections(ServerOptions(max_connections=1 << 40))


# Prints its port, then generates for each line that it reads.
SERVER = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from served import served
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
with served(max_connections=int(sys.argv[1])) as (generator, server):
    print(server.url.rpartition(":")[2], flush=True)
    for line in sys.stdin:
        generator.sleep()
        generator.wake()
        output, = generator.generate_batch([[5, 6]], max_new_tokens=8).values()
        print(output.status, len(output.generated_tokens), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("most", ["100", "20"])
def test_half_sent_requests_leave_the_engine_its_files(most):
    command = [sys.executable, "-c", SERVER, most]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as child, ExitStack() as opened:
        port = int(child.stdout.readline())
        for _ in range(400):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"POST / HTTP/1.1\r\n")
        for _ in range(3):
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "finished 8\n"
        opened.close()
        url = f"http://127.0.0.1:{port}/health"
        assert httpx.get(url, timeout=TIMEOUT_SECONDS).status_code == 200
        _, said = child.communicate(timeout=TIMEOUT_SECONDS)
    assert child.returncode == 0
    assert "Traceback" not in said
