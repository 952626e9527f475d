"""A run's report in a browser while it trains, and what it says in words."""

import http.client
import threading
from contextlib import contextmanager

import pytest
from report_page import Page, a_sequence

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.run_records import RunRecorder, StepMetrics
from cb_rollout.tools.report.figures import WINDOW, advice
from cb_rollout.tools.report.live import LiveReport


@contextmanager
def served(run_dir):
    with LiveReport(run_dir, port=0, refresh_seconds=3) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def answer(server, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    found = connection.getresponse()
    return found.status, found.read().decode()


def test_a_page_follows_the_records_of_a_run(tmp_path):
    with served(tmp_path / "later") as server:
        status, html = answer(server)
        assert (status, 'class="figures"' in html) == (200, False)
        assert "later" in Page(html).text
        recorder = RunRecorder(tmp_path / "later")
        for step in (1, 2):
            recorder.record_metrics(StepMetrics(step, "train", {"reward": step / 8}, [4]))
            recorder.record_sequence(a_sequence(step))
            status, html = answer(server, "/report.html")
            assert (status, html.count('http-equiv="refresh" content="3"')) == (200, 1)
            assert f"from {step} records" in Page(html).text
        status, html = answer(server, "/report_pages/step_2.html")
        assert status == 200
        assert "Step 2" in Page(html).text


def test_nothing_but_pages_of_the_report_is_served(tmp_path):
    RunRecorder(tmp_path).record_metrics(StepMetrics(1, "train", {"reward": 0.5}, [4]))
    (tmp_path / "secret.html").write_text("secret")
    with served(tmp_path) as server:
        for path in ("/secret.html", "/report_pages/../secret.html", "/..", "/metrics.jsonl"):
            assert answer(server, path)[0] == 404
        status, html = answer(server, Host="evil.example")
        assert (status, "reward" in html) == (403, False)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost:8008"], 200),
        (["localhost"], 200),
        (["LOCALHOST:8008"], 200),
        (["[::1]:8008"], 200),
        (["localhost:8008@evil.com"], 403),
        (["127.0.0.1:x"], 403),
        (["localhost", "evil.com"], 403),
        (["evil.com", "localhost"], 403),
        ([], 403),
    ],
)
def test_a_report_is_shown_to_requests_for_this_machine_alone(tmp_path, hosts, status):
    with served(tmp_path) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.putrequest("GET", "/", skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


def test_a_port_that_is_taken_is_named(tmp_path):
    with served(tmp_path) as server, pytest.raises(ConfigurationError, match=r"port \d+ .*--port"):
        LiveReport(tmp_path, server.server_port, 3)


@pytest.mark.parametrize(
    ("key", "quiet", "loud", "said"),
    [
        ("frac_reward_zero_std", 0.2, 0.75, "75% of the groups have equal rewards"),
        ("completions/clipped_ratio", 0.1, 0.5, "50% of the completions end by their length"),
        ("rollout/preemptions", 0, 3, "3 preemptions a step"),
        ("rollout/step_share", 0.5, 0.9, "Rollouts take 90% of a step"),
    ],
)
def test_the_last_steps_say_what_to_look_at(key, quiet, loud, said):
    steps = [StepMetrics(step, "train", {key: quiet}, []) for step in range(1, 30)]
    assert list(advice(steps)) == []
    steps += [StepMetrics(step, "train", {key: loud}, []) for step in range(30, 30 + WINDOW)]
    (sentence,) = advice(steps)
    assert said in sentence


def test_a_drift_that_grows_is_named_and_one_of_rounding_is_not():
    def run(*values):
        scalars = [{"rollout/logprob_drift_max": value} for value in values]
        return [StepMetrics(step, "train", own, []) for step, own in enumerate(scalars, 1)]

    assert list(advice(run(*[1e-6] * 20, *[9e-5] * 20))) == []
    assert list(advice(run(*[0.02] * 20, *[0.03] * 20))) == []
    (sentence,) = advice(run(*[0.001] * 20, *[0.3] * 20))
    assert "logprob_drift_max grows: 0.001 nats at first, 0.3 now" in sentence
