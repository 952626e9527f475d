"""`/inference/v1/generate` over HTTP: token ids in, token ids and log-probabilities out."""

import json

import httpx
import pytest
from served import TIMEOUT_SECONDS, served
from tiny import plain_logprobs

from cb_rollout import SamplingParams

PROMPT = [5, 6, 7, 8]
PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def serving():
    with served() as (generator, server):
        yield generator, server


@pytest.fixture
def generate(serving):
    generator, server = serving

    def post(sampling=(), **body):
        sampling = {"max_tokens": 8, "seed": 1, **dict(sampling)}
        body = {"token_ids": PROMPT, "sampling_params": sampling, **body}
        return httpx.post(f"{server.url}{PATH}", json=body, timeout=TIMEOUT_SECONDS)

    yield post
    assert generator.manager.engine.num_blocks_used == 0


def test_tokens_are_those_of_generate_batch_with_their_plain_logprobs(serving, generate):
    generator, _ = serving
    answer = generate({"logprobs": 1, "n": 2}, request_id="mine", return_token_ids=True).json()
    expected = generator.generate_batch(
        [PROMPT], sampling_params=SamplingParams(seed=1, max_new_tokens=8), num_return_sequences=2
    )
    assert (answer["request_id"], answer["prompt_token_ids"]) == ("mine", PROMPT)
    assert answer["output_mode"] == "tokens"
    for index, (choice, output) in enumerate(
        zip(answer["choices"], expected.values(), strict=True)
    ):
        tokens = choice["token_ids"]
        assert (choice["index"], tokens) == (index, output.generated_tokens)
        assert choice["finish_reason"] == output.finish_reason
        assert choice["policy_versions"] == [[0, len(tokens)]]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == tokens
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in tokens]
        assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(tokens)
        plain = plain_logprobs(generator.manager.model, PROMPT, tokens)
        assert [entry["logprob"] for entry in content] == pytest.approx(plain, abs=1e-5)
    num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_tokens


def test_without_logprobs_and_a_name_there_are_none_and_one_is_made(generate):
    answer = generate().json()
    assert answer["choices"][0]["logprobs"] is None
    assert answer["prompt_token_ids"] is None
    assert answer["request_id"]


def test_the_chunks_of_a_stream_add_up_to_the_whole(generate):
    settings = {"n": 2, "logprobs": 0, "max_tokens": 20, "ignore_eos": True}
    whole = generate(settings).json()
    stream = generate(settings, stream=True, stream_options={"include_usage": True}).text
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert sum(n for part in parts for _, n in part["policy_versions"]) == 20
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["length"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**9]}, "vocabulary"),
        ({"token_ids": ["5"]}, "token_ids"),
        ({"sampling": {"heat": 1}}, "heat"),
        ({"sampling": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"features": {}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
        ({"priority": 3}, "priority"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(generate, body, said):
    answer = generate(**body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
