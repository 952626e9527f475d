"""A request over HTTP takes up its caller's trace."""

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.trace import SpanKind
from served import TIMEOUT_SECONDS, client, idle, served
from telemetry import observed

from cb_rollout.metrics.observer import observer

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


@pytest.fixture(scope="module")
def serving():
    with served(allow_weight_updates=True) as (generator, server):
        yield generator, server


@pytest.fixture
def telemetry():
    with observed() as telemetry:
        yield telemetry


def ids(span):
    parent = span.parent
    return trace.format_trace_id(span.context.trace_id), trace.format_span_id(parent.span_id)


@pytest.mark.parametrize("stream", [False, True])
def test_every_sequence_is_a_child_of_the_callers_span(serving, telemetry, stream):
    generator, server = serving
    answer = client(server).chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        n=2,
        stream=stream,
        extra_headers=TRACEPARENT,
    )
    if stream:
        list(answer)
    assert idle(generator)
    spans = telemetry.spans("request")
    assert [ids(span) for span in spans] == [(TRACE_ID, SPAN_ID)] * 2
    assert {span.kind for span in spans} == {SpanKind.SERVER}
    assert spans[0].attributes["gen_ai.request.stream"] is stream


@pytest.mark.parametrize(
    "headers",
    [{}, {"traceparent": "00-nothing-of-the-kind-01"}, {"traceparent": "00-" + "0" * 32}],
    ids=["none", "malformed", "short"],
)
def test_a_caller_without_a_trace_begins_one(serving, telemetry, headers):
    generator, server = serving
    client(server).completions.create(
        model="policy", prompt="hello", max_tokens=2, extra_headers=headers
    )
    assert idle(generator)
    (span,) = telemetry.spans("request")
    assert (span.parent, span.kind) == (None, SpanKind.INTERNAL)


def test_a_caller_that_does_not_sample_is_followed(serving, telemetry):
    generator, server = serving
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
    client(server).completions.create(
        model="policy", prompt="hello", max_tokens=2, extra_headers=headers
    )
    assert idle(generator)
    assert telemetry.spans() == []


def test_one_callers_trace_is_not_anothers(serving, telemetry):
    generator, server = serving
    post = client(server)
    for number in (1, 2):
        headers = {"traceparent": f"00-{number:032x}-{SPAN_ID}-01"}
        post.completions.create(model="policy", prompt="a", max_tokens=2, extra_headers=headers)
    post.completions.create(model="policy", prompt="a", max_tokens=2)
    assert idle(generator)
    first, second, third = telemetry.spans("request")
    assert (first.context.trace_id, second.context.trace_id) == (1, 2)
    assert third.parent is None


def test_a_sync_that_a_trainer_asks_for_over_http_is_a_part_of_its_trace(serving, telemetry):
    _, server = serving

    def post(path, body=None):
        answer = httpx.post(
            f"{server.url}{path}", json=body, headers=TRACEPARENT, timeout=TIMEOUT_SECONDS
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    update_id = post("/start_weight_update", {"partial": True})["update_id"]
    post("/finish_weight_update", {"update_id": update_id})
    (sync,) = telemetry.spans("sync")
    assert ids(sync) == (TRACE_ID, SPAN_ID)


def test_a_span_of_the_servers_own_instrumentation_stays_the_parent(telemetry):
    with telemetry.tracer.start_as_current_span("of the web framework") as own:
        before = context.get_current()
        with observer().joined(TRACEPARENT):
            assert trace.get_current_span() is own
        assert context.get_current() == before
    with observer().joined(TRACEPARENT):
        found = trace.get_current_span().get_span_context()
    assert trace.format_trace_id(found.trace_id) == TRACE_ID
    assert not trace.get_current_span().get_span_context().is_valid
