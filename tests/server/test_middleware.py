"""What a server without a key answers: requests for this machine, of this machine's pages."""

import http.client
import socket
from contextlib import contextmanager

import pytest
from served import TIMEOUT_SECONDS, served

from cb_rollout.server.options import is_loopback_authority

LOCAL = [
    "localhost", "localhost:80", "LOCALHOST:8000", "localhost.", "Localhost.:1", "localhost:",
    "127.0.0.1", "127.0.0.1:65535", "127.8.9.1:1", "[::1]", "[::1]:80", "[0:0:0:0:0:0:0:1]:",
]  # fmt: skip
FOREIGN = [
    "", ":80", "evil.com", "evil.com:80", "localhost:80@evil.com", "localhost@evil.com",
    "user:pass@localhost", "localhost:80:90", "localhost:x", "localhost:-1", "localhost:+80",
    "localhost:65536", "localhost:99999", "localhost:000080", "localhost:\u0668\u0660",
    "localhost..", ".localhost", "localhost.evil.com", "evil.localhost", "localhost/", "local host",
    "localhost evil.com", "localhost, evil.com", "localhost:80 ", "localhost\n", "localhost#",
    "127.0.0.1.evil.com", "127.0.0.1.", "127.1", "2130706433", "0.0.0.0", "::1", "::1:80", "[::1",
    "::1]:80", "[::1]80", "[::1]evil.com", "[[::1]]", "[127.0.0.1]", "[localhost]",
    "[::1%evil.com]:80", "[::1%25@evil.com]", "[::]", "[]", "[:]:80",
]  # fmt: skip


@pytest.mark.parametrize("authority", LOCAL)
def test_an_authority_of_this_machine_is_told(authority):
    assert is_loopback_authority(authority)


@pytest.mark.parametrize("authority", FOREIGN)
def test_an_authority_that_is_not_exactly_this_machine_is_refused(authority):
    assert not is_loopback_authority(authority)


@pytest.fixture(scope="module")
def port():
    with served() as (_, server):
        yield int(server.url.rpartition(":")[2])


@contextmanager
def answer(port, *lines):
    """Send a request with these header lines, whatever they are, and yield its answer."""
    head = "\r\n".join(["GET /is_paused HTTP/1.1", *lines, "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) as connection:
        connection.sendall(head.encode("latin-1"))
        with http.client.HTTPResponse(connection) as found:
            found.begin()
            yield found


@pytest.mark.parametrize(
    "host", ["localhost:80", "LOCALHOST", "localhost.:80", "[::1]:80", " localhost:80 \t"]
)
def test_a_request_for_this_machine_is_answered(port, host):
    with answer(port, f"Host: {host}") as found:
        assert found.status == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: localhost:80@evil.com"],
        ["Host: [::1%@evil.com]:80"],
        ["Host: localhost:80:90"],
        ["Host: evil.com", "Host: localhost"],
        ["Host: localhost", "Host: evil.com"],
        ["Host: localhost", "Host: localhost"],
    ],
)
def test_a_request_for_another_name_or_for_several_is_refused(port, lines):
    with answer(port, *lines) as found:
        assert found.status in (400, 401)


@pytest.mark.parametrize(
    ("origins", "status"),
    [
        (["http://localhost:3000"], 200),
        (["HTTP://[::1]:3000"], 200),
        (["http://localhost:3000@evil.com"], 401),
        (["http://evil.com\\@localhost"], 401),
        (["http://user@localhost"], 401),
        (["http://localhost/page"], 401),
        (["localhost"], 401),
        (["http://evil.com", "http://localhost"], 401),
        (["http://localhost http://evil.com"], 401),
    ],
)
def test_a_page_of_exactly_this_machine_is_answered(port, origins, status):
    with answer(port, "Host: localhost", *(f"Origin: {each}" for each in origins)) as found:
        assert found.status == status
