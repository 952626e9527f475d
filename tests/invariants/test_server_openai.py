"""OpenAI's own client, unmodified, against the server."""

import json

import openai
import pytest
from served import IDS, client, idle, let_prefer, let_say, served
from tiny import byte_tokenizer, plain_logprobs

from cb_rollout import SamplingParams
from cb_rollout.rollout.trajectories import Trajectory

TOKENIZER = byte_tokenizer()
HELLO = [{"role": "user", "content": "Hello, \u4e16\u754c!"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
UNENFORCED = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {}, "uniqueItems": True}},
}
PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["Ulm", "K\u00f6ln"]}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln"}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def strict(parameters, name="weather"):
    """Return a tool whose calls obey a schema."""
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


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
    assert generator.manager.engine.num_blocks_used == 0


@pytest.fixture
def chat(serving, generator):
    chats = client(serving[1]).chat.completions
    return lambda messages, **settings: chats.create(model="policy", messages=messages, **settings)


@pytest.fixture
def complete(serving, generator):
    completions = client(serving[1]).completions
    return lambda prompt, **settings: completions.create(model="policy", prompt=prompt, **settings)


def chat_ids(messages, **settings):
    return TOKENIZER.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, **settings
    )["input_ids"]


def test_the_model_is_listed(serving):
    (model,) = client(serving[1]).models.list().data
    assert (model.id, model.object) == ("policy", "model")
    assert client(serving[1]).models.retrieve("policy").id == "policy"
    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
        client(serving[1]).models.retrieve("gpt")


def test_a_chat_is_what_generate_batch_gives_for_its_seed(generator, chat):
    answer = chat(HELLO, seed=7, n=3, max_tokens=20, logprobs=True, top_logprobs=4, extra_body=IDS)
    params = SamplingParams(seed=7, max_new_tokens=20)
    prompt_ids = chat_ids(HELLO)
    expected = list(
        generator.generate_batch(
            [prompt_ids], sampling_params=params, num_return_sequences=3
        ).values()
    )
    assert answer.prompt_token_ids == prompt_ids
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.completion_tokens == sum(len(o.generated_tokens) for o in expected)
    for choice, output in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == output.generated_tokens
        text = TOKENIZER.decode(output.generated_tokens, skip_special_tokens=True)
        assert choice.message.content == text
        assert choice.finish_reason == output.finish_reason
        assert choice.policy_versions == [[0, len(output.generated_tokens)]]
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        plain = plain_logprobs(generator.manager.model, prompt_ids, choice.token_ids)
        assert logprobs == pytest.approx(plain, abs=1e-5)
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 4
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
        told = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes)
        assert told.replace(b"<|end|>", b"").decode(errors="replace").startswith(text[:3])


def test_the_chunks_of_a_stream_add_up_to_the_whole_response(chat):
    settings = {"seed": 3, "max_tokens": 40, "n": 2, "logprobs": True, "extra_body": IDS}
    whole = chat(HELLO, **settings)
    chunks = list(chat(HELLO, stream=True, stream_options={"include_usage": True}, **settings))
    assert chunks[-1].usage == whole.usage
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for index, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        tokens = [token for c in mine[1:] for token in c.token_ids]
        assert tokens == choice.token_ids
        logprobs = [e.logprob for c in mine[1:] for e in c.logprobs.content]
        expected = [entry.logprob for entry in choice.logprobs.content]
        assert logprobs == pytest.approx(expected, abs=1e-5)
        versions = [run for c in mine[1:] for run in c.policy_versions]
        assert sum(count for _, count in versions) == len(tokens)


def test_token_ids_go_in_and_out(generator, complete):
    prompt = [5, 6, 7, 8]
    answer = complete(prompt, seed=1, max_tokens=12, logprobs=3, extra_body=IDS)
    (choice,) = answer.choices
    (expected,) = generator.generate_batch(
        [prompt], sampling_params=SamplingParams(seed=1, max_new_tokens=12)
    ).values()
    assert choice.token_ids == expected.generated_tokens
    assert choice.prompt_token_ids == prompt
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert len(choice.logprobs.top_logprobs[0]) == 3
    assert choice.logprobs.text_offset[0] == 0


def test_several_prompts_have_n_choices_each_in_order(complete):
    answer = complete([[5, 6], [7, 8], [5, 6]], n=2, seed=4, max_tokens=6, extra_body=IDS)
    assert [choice.index for choice in answer.choices] == list(range(6))
    prompts = [choice.prompt_token_ids for choice in answer.choices]
    assert prompts == [[5, 6]] * 2 + [[7, 8]] * 2 + [[5, 6]] * 2
    tokens = [choice.token_ids for choice in answer.choices]
    assert tokens[:2] == tokens[4:]
    assert tokens[0] != tokens[1]


def test_a_text_prompt_streams_the_text_of_its_whole_response(complete):
    whole = complete("ab", seed=9, max_tokens=30)
    parts = complete("ab", seed=9, max_tokens=30, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_and_is_not_in_it(generator, chat, stream):
    let_say(generator, "One, two. Three.")
    settings = {"stop": ["Thr", "o."], "max_tokens": 50, "extra_body": IDS}
    if stream:
        choices = [chunk.choices[0] for chunk in chat(HELLO, stream=True, **settings)]
        text = "".join(choice.delta.content or "" for choice in choices)
        reason = choices[-1].finish_reason
        tokens = [token for choice in choices[1:] for token in choice.token_ids]
    else:
        (choice,) = chat(HELLO, **settings).choices
        text, reason, tokens = choice.message.content, choice.finish_reason, choice.token_ids
    assert (text, reason) == ("One, tw", "stop")
    assert TOKENIZER.decode(tokens) == "One, two."


def test_an_answer_cut_off_by_its_length_has_finish_reason_length(chat):
    (choice,) = chat(HELLO, max_tokens=3, extra_body=IDS | {"ignore_eos": True}).choices
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_are_read(generator, chat, stream):
    let_say(generator, f"Let me look. {CALL}")
    messages = list(HELLO)
    if stream:
        chunks = list(chat(messages, tools=[WEATHER], stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
        content = "".join(delta.content or "" for delta in deltas)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = chat(messages, tools=[WEATHER]).choices
        (call,) = choice.message.tool_calls
        content, reason = choice.message.content, choice.finish_reason
    assert reason == "tool_calls"
    assert content.strip() == "Let me look."
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "K\u00f6ln"}
    assert call.id.startswith("call_")
    if stream:
        return
    # What the client says next goes through the template, calls and results included.
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    let_say(generator, "It rains.")
    answer = chat(messages, tools=[WEATHER], extra_body=IDS)
    assert answer.choices[0].message.content == "It rains."
    prompt = TOKENIZER.decode(answer.prompt_token_ids)
    assert CALL in prompt
    assert "<|start|>tool\nrain<|end|>" in prompt
    assert '"description": "of a city"' in prompt


def test_a_broken_call_is_text_and_no_tools_means_no_calls(generator, chat):
    let_say(generator, '<tool_call>{"name": }</tool_call>')
    (choice,) = chat(HELLO, tools=[WEATHER]).choices
    assert choice.message.tool_calls is None
    assert choice.message.content == '<tool_call>{"name": }</tool_call>'
    let_say(generator, CALL)
    for settings in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = chat(HELLO, **settings).choices
        assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
        assert choice.message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_strict_tool_obeys_its_schema(generator, chat, stream):
    let_prefer(generator, f"I see. {CALL}")
    settings = {"tools": [strict(PLACE)], "max_tokens": 400, "temperature": 0}
    if stream:
        deltas = [chunk.choices[0].delta for chunk in chat(HELLO, stream=True, **settings)]
        (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    else:
        (call,) = chat(HELLO, **settings).choices[0].message.tool_calls
    # The model prefers {"city": "K\u00f6ln"}.
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["place"] in ("Ulm", "K\u00f6ln")
    # Without strict it writes what it prefers.
    (choice,) = chat(HELLO, **(settings | {"tools": [WEATHER]})).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "K\u00f6ln"}


def test_beside_a_strict_tool_another_takes_any_object(generator, chat):
    tools = [WEATHER, strict(PLACE, "find")]
    let_prefer(generator, CALL)
    (call,) = chat(HELLO, tools=tools, max_tokens=200, temperature=0).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "K\u00f6ln"}
    # A tool that was not given cannot be named.
    let_prefer(generator, CALL.replace("weather", "fly"))
    (choice,) = chat(HELLO, tools=tools, max_tokens=200, temperature=0).choices
    assert "fly" not in choice.message.model_dump_json()


def test_a_strict_tool_without_parameters_takes_no_arguments(generator, chat):
    let_prefer(generator, CALL)
    (choice,) = chat(HELLO, tools=[strict(None)], max_tokens=200, temperature=0).choices
    assert choice.message.tool_calls[0].function.arguments == "{}"


def test_a_strict_tool_that_may_not_be_called_constrains_nothing(generator, chat):
    let_say(generator, CALL)
    (choice,) = chat(HELLO, tools=[strict(PLACE)], tool_choice="none").choices
    assert choice.message.content == CALL


def test_a_strict_tool_is_refused_where_the_model_has_a_form_of_its_own(serving, chat, monkeypatch):
    monkeypatch.setattr(serving[1].model.tool_parser, "has_template", True)
    with pytest.raises(openai.BadRequestError, match="a form of its own; leave strict out"):
        chat(HELLO, tools=[strict(PLACE)])


def test_an_answer_in_json_obeys_its_schema(chat):
    response_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    answer = chat(HELLO, response_format=response_format, n=8, seed=0, max_tokens=400)
    values = [json.loads(choice.message.content) for choice in answer.choices]
    assert all(value["name"] in ("Ada", "Bob") for value in values)
    assert all(value["age"] in (1, 20, 300) for value in values)
    assert len({json.dumps(value) for value in values}) > 1
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 2.0}, "top_p=2"),
        ({"n": 0}, "n: Input should be greater"),
        ({"n": 1000}, "1000 sequences are more than the 128 allowed"),
        ({"max_tokens": 10**5}, "lower max_tokens"),
        ({"logit_bias": {"x": 1}}, "not a token id"),
        ({"logit_bias": {"99999": 1}}, "outside the model's vocabulary"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"tool_choice": "required"}, "Input should be 'auto' or 'none': the model decides"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template: Extra inputs .* token ids"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search: Extra .* are sampled"),
        ({"extra_body": {"anything": 1}}, "anything: Extra .* no such field; leave it out"),
        ({"extra_body": {"best_of": 2}}, "best_of: Extra inputs .* send n, and choose"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                }
            },
            "response_format: the JSON schema cannot be enforced: `type` at # is",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": UNENFORCED},
                }
            },
            "does not enforce `uniqueItems` at #/properties/tags; leave it out",
        ),
        ({"tools": [strict(UNENFORCED)]}, "tools: .* `uniqueItems` at #/properties/tags"),
        ({"tools": [strict(PLACE), WEATHER]}, "two tools are named 'weather'; rename one"),
        ({"tools": [strict({"type": "object", "description": "x" * 70_000})]}, "70,0.. characters"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_with_its_reason(chat, settings, said):
    with pytest.raises(openai.BadRequestError, match=said):
        chat(HELLO, **settings)


def test_unsuitable_chats_and_prompts_are_refused(chat, complete):
    image = {"type": "image_url", "image_url": {"url": "http://x"}}
    with pytest.raises(openai.BadRequestError, match="the model reads no pictures"):
        chat([{"role": "user", "content": [image]}])
    with pytest.raises(openai.BadRequestError, match="outside the model's vocabulary"):
        complete([5, 10**6])
    with pytest.raises(openai.BadRequestError, match="prompt is empty"):
        complete("")
    with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens"):
        complete([5] * 5000)


def test_a_conversation_goes_on_token_by_token_and_reuses_its_keys(generator, chat):
    messages = [{"role": "user", "content": "Tell me a story. " * 20}]
    trajectory = Trajectory()
    counters = generator.manager.counters
    for turn in range(4):
        before = counters.copy()
        answer = chat(
            messages, seed=turn, max_tokens=60, logprobs=True, temperature=0.5, extra_body=IDS
        )
        assert trajectory.add_response(answer)
        messages += [
            answer.choices[0].message,
            {"role": "user", "content": f"And then? {turn}"},
        ]
        if turn:
            added = counters.since(before)
            new = added.prefill_tokens
            assert new + added.prefill_tokens_saved == len(answer.prompt_token_ids)
            # The last answer's end, the new turn, and what does not fill a block.
            assert new < 80 < added.prefill_tokens_saved
    (sample,) = trajectory.samples
    assert sum(sample.is_sampled) == sum(version == 0 for version in sample.policy_versions)
    model = generator.manager.model
    start = sample.is_sampled.index(True)
    plain = plain_logprobs(model, sample.token_ids[:start], sample.token_ids[start:], 0.5)
    for place, logprob in enumerate(plain, start):
        if sample.is_sampled[place]:
            assert sample.logprobs[place] == pytest.approx(logprob, abs=1e-5)


def test_rewritten_history_is_drift_and_begins_a_new_sample(chat):
    messages = list(HELLO)
    trajectory = Trajectory()
    first = chat(messages, seed=1, max_tokens=8, logprobs=True, extra_body=IDS)
    trajectory.add_response(first)
    messages += [
        {"role": "assistant", "content": "(left out)"},
        {"role": "user", "content": "Go on."},
    ]
    second = chat(messages, seed=1, max_tokens=8, logprobs=True, extra_body=IDS)
    assert not trajectory.add_response(second)
    assert trajectory.num_drifts == 1
    assert trajectory.samples[0].token_ids == [
        *first.prompt_token_ids, *first.choices[0].token_ids,
    ]  # fmt: skip
    assert trajectory.samples[1].is_sampled == (
        [False] * len(second.prompt_token_ids) + [True] * len(second.choices[0].token_ids)
    )


def test_cancelled_streams_leave_nothing_in_the_engine(generator, chat):
    for _ in range(3):
        stream = chat(HELLO, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    engine = generator.manager.engine
    assert idle(generator)
    assert engine.num_blocks_used == 0
    assert engine.counters.tokens_generated < 9000


def test_a_client_time_out_cancels_its_request(generator, serving):
    hasty = client(serving[1], timeout=0.3)
    with pytest.raises(openai.APITimeoutError):
        hasty.completions.create(
            model="policy", prompt="x", max_tokens=4000, extra_body={"ignore_eos": True}, n=64
        )
    assert idle(generator)
