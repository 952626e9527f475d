"""Bodies that are refused, whatever their size."""

import json

import httpx
import pytest
from pydantic import ValidationError
from served import TIMEOUT_SECONDS, served

from cb_rollout.server import protocol

# Each item of a bad list is a fault, in each reading of the list.
MANY = 20_000
NAMES = {f"a{number}": 1 for number in range(MANY)}
USER = {"role": "user", "content": "a"}

CHAT, COMPLETION = protocol.ChatCompletionRequest, protocol.CompletionRequest
FAULTY = {
    "prompt": (COMPLETION, {"prompt": [{}] * MANY}),
    "prompt of prompts": (COMPLETION, {"prompt": [[{}]] * MANY}),
    "prompt of one": (COMPLETION, {"prompt": [[{}] * MANY]}),
    "mixed prompt": (COMPLETION, {"prompt": [1] * MANY + ["a"] * MANY}),
    "fields": (COMPLETION, {"prompt": "a", **NAMES}),
    "logit_bias": (COMPLETION, {"prompt": "a", "logit_bias": dict.fromkeys(NAMES, "a")}),
    "large logit_bias": (COMPLETION, {"prompt": "a", "logit_bias": dict.fromkeys(NAMES, 101)}),
    "stop": (COMPLETION, {"prompt": "a", "stop": [1] * MANY}),
    "stop_token_ids": (COMPLETION, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
    "messages": (CHAT, {"messages": [{}] * MANY}),
    "message": (CHAT, {"messages": [USER | NAMES]}),
    "content": (CHAT, {"messages": [USER | {"content": [{}] * MANY}]}),
    "tool_calls": (CHAT, {"messages": [USER | {"tool_calls": [{}] * MANY}]}),
    "tools": (CHAT, {"messages": [USER], "tools": [{}] * MANY}),
    "token_ids": (protocol.TokenRequest, {"token_ids": ["a"] * MANY, "sampling_params": {}}),
    "sampling_params": (protocol.TokenRequest, {"token_ids": [1], "sampling_params": NAMES}),
    "request_ids": (protocol.AbortRequest, {"request_ids": [1] * MANY}),
    "shapes": (
        protocol.UpdateRequest,
        {"update_info": {"names": [1] * MANY, "dtype_names": [1] * MANY, "shapes": [["a"]] * MANY}},
    ),
}


@pytest.mark.parametrize(("kind", "body"), FAULTY.values(), ids=FAULTY)
def test_a_body_is_not_read_past_its_first_faults(kind, body):
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= 8


def test_unknown_fields_are_named_and_a_right_body_is_taken():
    with pytest.raises(ValidationError, match="a0") as raised:
        COMPLETION.model_validate({"prompt": "a", **NAMES})
    assert raised.value.error_count() == protocol.MAX_FAULTS
    taken = COMPLETION.model_validate({"prompt": [[5, 6]], "logit_bias": {"5": -100, "6": 0.5}})
    assert (taken.prompt, taken.logit_bias) == ([[5, 6]], {5: -100.0, 6: 0.5})
    schema = {"name": "a", "schema": {"type": "null"}}
    assert protocol.JsonSchema.model_validate(schema).json_schema == {"type": "null"}


@pytest.mark.parametrize("value", [True, 3.0, "3", None])
def test_what_is_no_whole_number_is_no_token_id(value):
    for ids in ([value], [5, value]):
        for prompt in (ids, [ids]):
            if not (value == "3" and prompt == ["3"]):
                with pytest.raises(ValidationError):
                    COMPLETION.model_validate({"prompt": prompt})
        with pytest.raises(ValidationError):
            COMPLETION.model_validate({"prompt": "a", "stop_token_ids": ids})
        with pytest.raises(ValidationError):
            protocol.TokenRequest.model_validate({"token_ids": ids, "sampling_params": {}})


# Each of them would name a token that another key names too.
NOT_CANONICAL = [
    " 5", "5 ", "+5", "\u0665", "05", "-0", "1_0", "5.0", "5e0", "0x5", "", "\n5", "five",
    "\uff15", "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("key", NOT_CANONICAL)
def test_a_key_of_logit_bias_is_a_token_id_in_plain_digits(key):
    with pytest.raises(ValidationError, match="is not a token id") as raised:
        COMPLETION.model_validate({"prompt": "a", "logit_bias": {"5": 1, key: 2}})
    assert len(str(raised.value)) < 2000
    taken = COMPLETION.model_validate({"prompt": "a", "logit_bias": {"0": 1, "10": 2, "-1": 3}})
    assert taken.logit_bias == {0: 1, 10: 2, -1: 3}


@pytest.mark.parametrize("reward", ["1", " 1", "1e3", "\u0661", [1], {}])
def test_a_reward_is_a_number_and_no_text(reward):
    with pytest.raises(ValidationError):
        protocol.EndRequest.model_validate({"reward": reward})
    for number in (1, 0.5, True):
        assert protocol.EndRequest.model_validate({"reward": number}).reward == number


@pytest.fixture(scope="module")
def post():
    with served(max_sequences=4) as (_, server):

        def send(path, text=None, **body):
            content = (text or json.dumps(body)).encode()
            headers = {"content-type": "application/json"}
            url = f"{server.url}{path}"
            return httpx.post(url, content=content, headers=headers, timeout=TIMEOUT_SECONDS)

        yield send


def refused(answer, said):
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    return answer.json()["error"]


def test_prompts_are_counted_before_the_first_is_encoded(post):
    # The text that cannot be encoded is not reached.
    prompts = ["\ud800", *["a"] * 4]
    refused(post("/v1/completions", prompt=prompts), "5 sequences are more than the 4 allowed")
    refused(post("/v1/completions", prompt=["a", "b"], n=3), "6 sequences")


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_without_content_is_refused(post, role, content):
    messages = [USER, {"role": role, **content}]
    answer = post("/v1/chat/completions", messages=messages)
    assert refused(answer, "messages.1.content: ")["param"] == "messages"
    refused(answer, "a message of this role needs content")
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    taken = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    CHAT.model_validate({"messages": taken})


def test_a_long_stop_string_is_refused(post):
    for path, more in (
        ("/v1/completions", {"prompt": [5]}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ):
        refused(post(path, stop="a" * 1025, **more), "1024")
        refused(post(path, stop=["a", "a" * 1025], **more), "1024")
    params = {"stop": ["a" * 1025]}
    refused(post("/inference/v1/generate", token_ids=[5], sampling_params=params), "1024")


def test_a_fields_name_is_repeated_shortened(post):
    error = refused(post("/v1/completions", prompt=[5], **{"a" * 100_000: 1}), "not permitted")
    assert len(error["message"]) < 300
    assert len(error["param"]) <= 100


def test_a_body_that_nests_too_deeply_is_refused(post):
    for depth in (500, 900, 990, 5000, 100_000):
        schema = '{"items":' * depth + "{}" + "}" * depth
        tool = f'{{"type":"function","function":{{"name":"a","parameters":{schema}}}}}'
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"tools":[{tool}]'
        answer = post("/v1/chat/completions", f"{body}}}")
        assert answer.status_code == 400, answer.text


def test_a_number_beyond_its_bound_is_refused_and_the_server_goes_on(post):
    for name, value in (
        ("top_k", 2**63), ("top_k", 2**31), ("temperature", 1e300), ("seed", 2**64),
        ("max_tokens", 10**30), ("min_tokens", 2**63), ("repetition_penalty", 1e300),
        ("presence_penalty", -1e300), ("frequency_penalty", 1e300), ("stop_token_ids", [2**63]),
        ("logit_bias", {str(2**63): 1}), ("top_p", 1e300), ("min_p", 1e300), ("n", 2**63),
    ):  # fmt: skip
        answer = post("/v1/completions", prompt=[5], **{name: value})
        assert answer.status_code == 400, (name, answer.text)
    assert post("/v1/completions", prompt=[2**63]).status_code == 400
    assert post("/v1/completions", prompt=[5], max_tokens=2).status_code == 200
