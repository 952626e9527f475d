"""OpenAI's Responses API, by OpenAI's own client and types, against the chat endpoint."""

import json
import re
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import Literal

import httpx
import openai
import pytest
from openai.types.responses import response_create_params
from pydantic import BaseModel
from served import TIMEOUT_SECONDS, client, idle, let_prefer, let_say, served, until
from tiny import byte_tokenizer, tiny_model

from cb_rollout.server.openai.responses_body import REFUSED, ResponsesRequest

HELLO = "Hello, \u4e16\u754c!"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"age": {"enum": [1, 20]}}, "required": ["age"]}


class Asking:
    """A call in a thread of its own, which ends with the context."""

    def __init__(self, call, *arguments, **settings):
        self._thread = threading.Thread(target=self._run, args=(call, arguments, settings))

    def _run(self, call, arguments, settings):
        self.answer = call(*arguments, **settings)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._thread.join(TIMEOUT_SECONDS)


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 20, 300]


@pytest.fixture(scope="module")
def serving():
    with served() as (generator, server):
        yield generator, server


@pytest.fixture
def generator(serving):
    generator, _ = serving
    defaults = generator.manager.defaults
    yield generator
    generator.manager.defaults = defaults
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0


@pytest.fixture
def respond(serving, generator):
    responses = client(serving[1]).responses
    return lambda given, **settings: responses.create(model="policy", input=given, **settings)


@pytest.fixture
def chat(serving, generator):
    chats = client(serving[1]).chat.completions

    def ask(messages, **settings):
        return chats.create(model="policy", messages=messages, temperature=0, **settings)

    return ask


def checked(answer):
    """Return an answer or event after OpenAI's types have checked every field of it."""
    return type(answer).model_validate(answer.to_dict(mode="json"))


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def part(text, kind="input_text"):
    return {"type": kind, "text": text}


CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"x": 1}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
THOUGHT = {
    "type": "reasoning", "id": "rs_1", "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}  # fmt: skip


@pytest.mark.fast_cases("settings8-messages8")
@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"input": HELLO}, [user(HELLO)]),
        ({"input": HELLO, "instructions": "Be brief."}, [system("Be brief."), user(HELLO)]),
        ({"input": [user(HELLO)]}, [user(HELLO)]),
        ({"input": [user([part("a"), part("b")])]}, [user("ab")]),
        ({"input": [{"type": "message", **system("s")}, user("a")]}, [system("s"), user("a")]),
        (
            {"input": [user("a"), {"role": "assistant", "content": [part("b", "output_text")]}]},
            [user("a"), {"role": "assistant", "content": "b"}],
        ),
        (
            {"input": [user("a"), CALL_ITEM, OUTPUT_ITEM]},
            [user("a"), {"role": "assistant", "tool_calls": [CALLED]}, RESULT],
        ),
        (
            {
                "input": [
                    user("a"), {"role": "assistant", "content": "I look."},
                    CALL_ITEM, CALL_ITEM, OUTPUT_ITEM, OUTPUT_ITEM | {"output": [part("rain")]},
                ]
            },
            [
                user("a"),
                {"role": "assistant", "content": "I look.", "tool_calls": [CALLED, CALLED]},
                RESULT, RESULT,
            ],
        ),
        (
            {"input": [user("a"), THOUGHT, {"role": "assistant", "content": "b"}, user("c")]},
            [
                user("a"), {"role": "assistant", "content": "b", "reasoning_content": "Hm."},
                user("c"),
            ],
        ),
    ],
)  # fmt: skip
def test_a_response_has_the_tokens_of_its_chat(respond, chat, settings, messages):
    given = settings.pop("input")
    answer = checked(respond(given, max_output_tokens=12, temperature=0, **settings))
    expected = chat(messages, max_tokens=12)
    assert answer.output_text == expected.choices[0].message.content
    assert answer.usage.input_tokens == expected.usage.prompt_tokens
    assert answer.usage.output_tokens == expected.usage.completion_tokens
    assert answer.usage.total_tokens == expected.usage.total_tokens
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_response_says_with_what_it_was_sampled(generator, respond):
    let_say(generator, "Yes.")
    answer = checked(
        respond(
            HELLO, temperature=0.5, top_p=0.9, metadata={"a": "b"}, store=False,
            instructions="Be brief.", max_output_tokens=50, truncation="disabled",
            text={"format": {"type": "text"}, "verbosity": "medium"}, background=False,
            parallel_tool_calls=True, service_tier="auto", prompt_cache_key="k",
            include=["reasoning.encrypted_content"], reasoning={"effort": None},
        )
    )  # fmt: skip
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", "Yes.")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 50)
    assert (answer.metadata, answer.instructions) == ({"a": "b"}, "Be brief.")
    assert answer.store is False
    assert answer.completed_at >= answer.created_at
    assert respond(HELLO, temperature=0).temperature == 0


def text_events(num_deltas):
    return [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", *["response.output_text.delta"] * num_deltas,
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
    ]  # fmt: skip


def test_the_events_of_a_stream_add_up_to_the_whole_response(respond):
    settings = {"max_output_tokens": 30, "temperature": 0}
    whole = respond(HELLO, **settings)
    events = [checked(event) for event in respond(HELLO, stream=True, **settings)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    names = [event.type for event in events]
    assert names == [*text_events(len(deltas)), "response.incomplete"]
    assert len(deltas) > 3
    assert "".join(deltas) == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
    assert events[0].response.status == "in_progress"
    assert events[-4].text == whole.output_text
    assert events[-2].item == last.output[0]


def test_openais_own_accumulator_reads_a_stream(serving, generator):
    let_say(generator, f"Let me look. {CALL}")
    responses = client(serving[1]).responses
    with responses.stream(model="policy", input=HELLO, tools=[WEATHER]) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_response()
    message, call = final.output
    assert message.content[0].text.strip() == "Let me look."
    assert json.loads(call.arguments) == {"city": "K\u00f6ln"}
    assert names[-5:] == [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip


@pytest.mark.fast_cases("Let me look. -False")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["Let me look. ", ""])
def test_tools_are_called_and_their_results_are_read(generator, respond, chat, before, stream):
    let_say(generator, before + CALL + CALL.replace("K\u00f6ln", "Ulm"))
    if stream:
        events = [checked(event) for event in respond(HELLO, tools=[WEATHER], stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        indices = [e.output_index for e in events if e.type == "response.output_item.done"]
        assert indices == list(range(len(indices)))
        answer = events[-1].response
    else:
        answer = checked(respond(HELLO, tools=[WEATHER]))
    assert answer.status == "completed"
    kinds = ["message"] * bool(before) + ["function_call"] * 2
    assert [item.type for item in answer.output] == kinds
    calls = answer.output[-2:]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["K\u00f6ln", "Ulm"]
    assert len({call.call_id for call in calls}) == 2
    # The items go back as they came, with a result for each call.
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        for call in calls
    ]
    let_say(generator, "It rains.")
    again = checked(respond([user(HELLO), *answer.output, *results], tools=[WEATHER]))
    assert again.output_text == "It rains."
    # What the chat endpoint makes of it.
    function = {"name": "weather", "parameters": PARAMETERS, "strict": False}
    said = [
        {"id": call.call_id, "type": "function",
         "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]  # fmt: skip
    messages = [
        user(HELLO),
        {"role": "assistant", "content": answer.output_text or None, "tool_calls": said},
        *({"role": "tool", "tool_call_id": c.call_id, "content": "rain"} for c in calls),
    ]
    expected = chat(messages, tools=[{"type": "function", "function": function}])
    assert again.usage.input_tokens == expected.usage.prompt_tokens


def test_no_tool_is_called_where_none_may_be(generator, respond):
    let_say(generator, CALL)
    answer = checked(respond(HELLO, tools=[WEATHER], tool_choice="none"))
    assert answer.output_text == CALL
    assert answer.tool_choice == "none"
    assert answer.tools[0].strict is False


def test_the_calls_of_a_strict_tool_obey_its_schema(generator, respond):
    let_prefer(generator, CALL)
    parameters = {
        "type": "object", "properties": {"place": {"enum": ["Ulm"]}}, "required": ["place"],
        "additionalProperties": False,
    }  # fmt: skip
    tool = WEATHER | {"parameters": parameters, "strict": True}
    answer = checked(respond(HELLO, tools=[tool], temperature=0, max_output_tokens=300))
    assert json.loads(answer.output[0].arguments) == {"place": "Ulm"}
    assert answer.tools[0].strict is True


def test_an_answer_in_json_obeys_its_schema(serving, respond):
    form = {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}
    answer = checked(respond(HELLO, text={"format": form}, max_output_tokens=300))
    assert json.loads(answer.output_text)["age"] in (1, 20)
    assert answer.text.format.schema_ == SCHEMA
    answer = respond(HELLO, text={"format": {"type": "json_object"}}, max_output_tokens=20)
    assert answer.output_text.lstrip()[0] in "[{"
    assert answer.text.format.type == "json_object"
    responses = client(serving[1]).responses
    parsed = responses.parse(model="policy", input=HELLO, text_format=Person, max_output_tokens=300)
    assert parsed.output_parsed.age in (1, 20, 300)


def test_log_probabilities_are_those_of_the_chat(respond, chat):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    settings = {"max_output_tokens": 10, "temperature": 0, **asked}
    whole = checked(respond(HELLO, **settings))
    expected = chat([user(HELLO)], max_tokens=10, logprobs=True, top_logprobs=3)
    wanted = [entry.to_dict() for entry in expected.choices[0].logprobs.content]
    found = [entry.to_dict() for entry in whole.output[0].content[0].logprobs]
    assert [entry["token"] for entry in found] == [entry["token"] for entry in wanted]
    logprobs = [entry["logprob"] for entry in wanted]
    assert [entry["logprob"] for entry in found] == pytest.approx(logprobs, abs=1e-5)
    assert [len(entry["top_logprobs"]) for entry in found] == [3] * 10
    events = list(respond(HELLO, stream=True, **settings))
    streamed = [e for e in events if e.type == "response.output_text.delta"]
    tokens = [entry.token for event in streamed for entry in event.logprobs]
    assert tokens == [entry["token"] for entry in wanted]


def test_usage_counts_the_cached_tokens_of_a_prompt(respond):
    text = "Tell me a story, and a long one. " * 20
    first = respond(text, max_output_tokens=4).usage
    again = respond(text, max_output_tokens=4).usage
    assert first.input_tokens_details.cached_tokens < 32
    # All but what does not fill a block of 16.
    assert again.input_tokens_details.cached_tokens > again.input_tokens - 17
    details = again.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == again.input_tokens


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server keeps no resp"),
        ({"conversation": "conv_1"}, "conversation: .* send the earlier items in `input`"),
        ({"store": True}, "store: this server keeps no responses; leave store out"),
        ({"background": True}, "background: a response is answered where it was asked for"),
        ({"truncation": "auto"}, "truncation: no input is shortened"),
        ({"service_tier": "flex"}, "service_tier: this server has one tier"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls: the number of calls"),
        ({"max_tool_calls": 1}, "max_tool_calls: it counts built-in tools"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort: may be null alone: the model's chat"),
        ({"tool_choice": "required"}, "tool_choice: Input should be 'auto' or 'none'"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: Input should be 'function'"),
        ({"include": ["file_search_call.results"]}, "include.0: Input should be"),
        ({"top_logprobs": 2}, "top_logprobs needs include="),
        (
            {"include": ["message.output_text.logprobs"], "tools": [WEATHER]},
            "an answer with tools has no log-probabilities",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfuscation"),
        ({"max_output_tokens": 10**5}, "lower max_output_tokens"),
        ({"temperature": -1}, "temperature=-1"),
        ({"input": []}, "input: List should have at least 1 item"),
        (
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input.0: may be an item of",
        ),
        (
            {"input": [user([{"type": "input_file", "file_id": "f"}])]},
            "content.0: may be a part of type",
        ),
        ({"input": [user([{"type": "input_image", "image_url": "u"}])]}, "reads no pictures"),
        ({"input": [THOUGHT, user("a")]}, "input.0: no assistant's item follows a reasoning item"),
        ({"input": [user("a"), THOUGHT]}, "input.1: no assistant's item follows a reasoning item"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format has no"),
        (
            {"text": {"format": {"type": "json_object"}}, "tools": [WEATHER]},
            "text.format and tools exclude each other",
        ),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template: Extra inputs"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_with_its_reason(respond, settings, said):
    given = settings.get("input", HELLO)
    rest = {name: value for name, value in settings.items() if name != "input"}
    with pytest.raises(openai.BadRequestError, match=said):
        respond(given, **rest)


A_TEXT_OR_ITEMS = "input: may be a text, or a list of items, such as ["
A_TEXT_OR_PARTS = "may be a text, or a list of parts, such as ["
AN_ITEM = "may be an item of type message, function_call, function_call_output or reasoning, such"
A_PART = "may be a part of type input_text, output_text, text or input_image, such as {"
ROLES = "Input should be 'system', 'developer', 'user' or 'assistant'"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, A_TEXT_OR_ITEMS),
        ({"input": None}, A_TEXT_OR_ITEMS),
        ({"input": 5}, A_TEXT_OR_ITEMS),
        ({"input": user("a")}, A_TEXT_OR_ITEMS),
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": ["a"]}, f"input.0: {AN_ITEM}"),
        ({"input": [user("a"), {"type": 5}]}, f"input.1: {AN_ITEM}"),
        ({"input": [{"type": "web_search_call"}]}, f"input.0: {AN_ITEM}"),
        ({"input": [{"role": "tool", "content": "a"}]}, f"input.0.role: {ROLES}"),
        ({"input": [{"content": "a"}]}, f"input.0.role: {ROLES}"),
        ({"input": [{"role": "user"}]}, f"input.0.content: {A_TEXT_OR_PARTS}"),
        ({"input": [user(5)]}, f"input.0.content: {A_TEXT_OR_PARTS}"),
        ({"input": [user([{"text": "a"}])]}, f"input.0.content.0: {A_PART}"),
        ({"input": [user([{"type": "input_file"}])]}, f"input.0.content.0: {A_PART}"),
        ({"input": [user(["a"])]}, f"input.0.content.0: {A_PART}"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": 5}]},
            f"input.0.output: {A_TEXT_OR_PARTS}",
        ),
        ({"input": [{"type": "reasoning"}]}, "input.0.content: Input should be a valid list"),
        ({"input": "a", "reasoning": "low"}, "reasoning: may be null, or an object whose effort"),
        ({"input": "a", "reasoning": ["low"]}, "reasoning: may be null, or an object"),
        ({"input": "a", "reasoning": {"summary": "auto"}}, "reasoning.summary: may be null alone"),
        ({"input": "a", "reasoning": {"effort": 1}}, "reasoning.effort: may be null alone"),
        ({"input": "a", "text": "json"}, "text: Input should be an object"),
        ({"input": "a", "instructions": 5}, "instructions: Input should be a valid string"),
    ],
)
def test_a_fault_names_the_field_and_what_it_may_be(serving, body, said):
    answer = httpx.post(f"{serving[1].base_url}/responses", json={"model": "policy"} | body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(said)
    assert error["param"] == re.split("[.:]", said)[0]
    for word in ("dictionary", "instance", "discriminator", "tag", "None", "["):
        assert word not in error["message"].split(", such as")[0]


def test_every_field_of_openais_client_is_read_or_refused(serving):
    names = set(response_create_params.ResponseCreateParamsBase.__annotations__)
    assert len(names) > 25
    body = {"input": "x", "model": "policy", "max_output_tokens": 1}
    unread = names - set(ResponsesRequest.model_fields)
    for name in sorted(unread | set(REFUSED)):
        answer = httpx.post(f"{serving[1].base_url}/responses", json=body | {name: {"a": 1}})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == name


def test_a_session_keeps_the_tokens_of_its_responses(serving, generator):
    with serving[1].session() as session:
        agent = openai.OpenAI(base_url=session.base_url, api_key="none", max_retries=0)
        answer = agent.responses.create(model="policy", input=HELLO, max_output_tokens=5)
        agent.close()
        (output,) = session.outputs
    assert len(output.generated_tokens) == answer.usage.output_tokens
    assert len(output.prompt_ids) == answer.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_response_is_answered_with_what_it_has(serving, respond, stream):
    router = serving[1].model.output_router
    extra = {"request_id": "r7", "ignore_eos": True}
    url = f"{serving[1].url}/abort_requests"
    if stream:
        events = respond(HELLO, max_output_tokens=3000, stream=True, extra_body=extra)
        first = [next(events) for _ in range(6)]
        assert httpx.post(url, json={"request_ids": ["r7"]}).json()["aborted"] == 1
        answer = [*first, *events][-1].response
    else:
        with Asking(respond, HELLO, max_output_tokens=3000, extra_body=extra) as asking:
            until(lambda: router.num_in_flight == 1)
            assert httpx.post(url, json={"request_ids": ["r7"]}).json()["aborted"] == 1
        answer = asking.answer
    assert checked(answer).status == "cancelled"
    assert answer.output[0].status == "incomplete"
    assert answer.usage.output_tokens < 3000


def test_a_stream_that_fails_ends_with_an_error_and_a_failed_response(serving, respond):
    events = respond(HELLO, max_output_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    first = [next(events) for _ in range(6)]
    serving[1].model.output_router.cancel_all()
    *_, error, failed = [*first, *events]
    assert checked(error).type == "error"
    assert "cancelled by the server" in error.message
    assert checked(failed).type == "response.failed"
    assert failed.response.status == "failed"
    assert failed.response.error.code == "server_error"


@contextmanager
def transformers_serving(checkpoint, *options):
    """Serve a checkpoint by `transformers serve`; return a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    run = "from transformers.cli.transformers import app; app()"
    where = ("--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32")
    command = [sys.executable, "-c", run, "serve", str(checkpoint), *where, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None
        with suppress(httpx.ConnectError):
            return httpx.get(f"{url}/health").status_code == 200

    reader = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    try:
        until(answers)
        yield reader
    finally:
        reader.close()
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--continuous-batching", "--cb-block-size", "32")])
def test_transformers_serve_answers_with_the_same_text_and_events(tmp_path, options):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(tmp_path)
    settings = {"input": HELLO, "temperature": 0, "max_output_tokens": 24}
    with transformers_serving(tmp_path, *options) as reader:
        other = reader.responses.create(model=str(tmp_path), stream=False, **settings)
        events = list(reader.responses.create(model=str(tmp_path), stream=True, **settings))
    with served() as (_, server):
        responses = client(server).responses
        own = responses.create(model="policy", **settings)
        streamed = list(responses.create(model="policy", stream=True, **settings))
    # Without a response template, transformers 5.23 returns the prompt's text before the answer.
    chat = [user(HELLO)]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert other.output_text.removeprefix(prompt) == own.output_text
    assert other.usage.input_tokens == own.usage.input_tokens
    assert other.usage.output_tokens == own.usage.output_tokens
    # transformers calls what was cut off completed.
    assert distinct(events) == [*distinct(streamed)[:-1], "response.completed"]


def distinct(events):
    """Return the types of events, each run of one type once."""
    names = [event.type for event in events]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
