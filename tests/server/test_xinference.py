"""Xinference's own client, unmodified, against the server."""

import os
import threading

import httpx
import pytest
from served import TIMEOUT_SECONDS, idle, let_say, served, until
from tiny import byte_tokenizer, tiny_model
from xinference_client import RESTfulClient

from cb_rollout import RolloutConfig

HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
ENDLESS = {"max_tokens": 3000, "ignore_eos": True}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """Serve a checkpoint, which `cb-rollout serve` loads in the same way."""
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tokenizer = byte_tokenizer()
    saved = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
    saved.save_pretrained(path)
    model = type(saved).from_pretrained(path).eval()
    config = RolloutConfig(seed=0, block_size=16, max_requests_per_batch=16)
    with served(config, model, tokenizer, model_name="tiny") as (generator, server):
        yield generator, server, str(path)


@pytest.fixture
def generator(serving):
    generator, _, _ = serving
    defaults = generator.manager.defaults
    yield generator
    generator.manager.defaults = defaults
    assert idle(generator)


@pytest.fixture
def xinference(serving, generator):
    client = RESTfulClient(serving[1].url)
    yield client
    for uid in set(client.list_models()) - {"tiny"}:
        client.terminate_model(uid)
    client.close()


@pytest.fixture
def launched(serving, xinference):
    """Launch the checkpoint by its path, as the guide's example does by its name."""
    uid = xinference.launch_model(
        model_engine="transformers", model_name="qwen-chat", model_path=serving[2],
        model_format="pytorch", model_size_in_billions=4, quantization="none",
    )  # fmt: skip
    model = xinference.get_model(uid)
    yield model
    model.close()


def test_a_model_is_launched_by_its_path_described_and_terminated(serving, xinference):
    uid = xinference.launch_model("mine", model_path=serving[2], model_engine="Transformers")
    assert uid == "mine"
    assert set(xinference.list_models()) == {"tiny", "mine"}
    described = xinference.describe_model(uid)
    assert described["model_type"] == "LLM"
    assert described["model_ability"] == ["generate", "chat", "tools"]
    assert described["context_length"] == serving[1].model.max_model_len
    assert xinference.get_launch_model_progress(uid) == {"progress": 1.0}
    xinference.terminate_model(uid)
    assert set(xinference.list_models()) == {"tiny"}
    with pytest.raises(RuntimeError, match="the model 'mine' does not exist"):
        xinference.get_model(uid)
    with pytest.raises(RuntimeError, match="the model 'mine' was not launched"):
        xinference.terminate_model(uid)
    with pytest.raises(RuntimeError, match="'tiny' was not launched; it ends with the server"):
        xinference.terminate_model("tiny")


def test_each_launch_has_a_name_of_its_own(serving, xinference):
    path = serving[2]
    launch = xinference.launch_model
    assert launch("mine", model_path=path, model_uid="a") == "a"
    with pytest.raises(RuntimeError, match="a model of the uid 'a' is launched already"):
        launch("mine", model_path=path, model_uid="a")
    assert launch("mine", model_path=path) == "mine"
    assert launch("mine", model_path=f"{path}/.") == "mine-1"
    assert launch("org/mine", model_path=path, max_num_seqs=16) == "org-mine"
    # The server's own name, which goes on after its launch ends.
    assert launch("tiny", wait_ready=False) == "tiny"
    assert launch("tiny") == "tiny-1"
    xinference.terminate_model("tiny")
    assert "tiny" in xinference.list_models()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_path": "/etc"}, "loads no other model; launch that one by its model_path"),
        ({"model_path": "tiny"}, "loads no other model"),
        ({"model_path": "{path}/.."}, "loads no other model"),
        ({"model_name": "qwen1.5-chat"}, "loads no other model"),
        ({"model_engine": "vllm"}, "model_engine: this server takes the place of"),
        ({"model_type": "embedding"}, "model_type: this server has a causal language model"),
        ({"quantization": "4-bit"}, "quantization: a launch quantises nothing"),
        ({"model_format": "ggufv2"}, "model_format: this server reads transformers'"),
        ({"replica": 2}, "replica: this server has one model; start more servers"),
        ({"n_gpu": 2}, "n_gpu: the server chose its device"),
        ({"gpu_idx": [0]}, "gpu_idx: the server chose its device"),
        ({"envs": {"A": "b"}}, "envs: a launch starts no process"),
        ({"enable_virtual_env": True}, "enable_virtual_env: a launch starts no process"),
        ({"peft_model_config": {"lora_list": []}}, "peft_model_config: serve a checkpoint"),
        ({"max_num_seqs": 32}, "the model runs with max_num_seqs=16"),
        ({"model_uid": "../x"}, "model_uid: String should match pattern"),
        ({"trust_remote_code": True}, "trust_remote_code: Extra inputs"),
    ],
)
def test_a_launch_of_what_does_not_run_is_refused_with_its_reason(
    serving, xinference, settings, said
):
    path = settings.get("model_path", None if "model_name" in settings else "{path}")
    asked = {"model_name": "mine", **settings, "model_path": path and path.format(path=serving[2])}
    with pytest.raises(RuntimeError, match=said):
        xinference.launch_model(**asked)
    assert set(xinference.list_models()) == {"tiny"}


@pytest.mark.parametrize(
    "asked",
    [
        {"model_name": "second", "model_path": "/models/second"},
        {"model_name": "second", "model_path": "org/second", "model_uid": "b"},
        {"model_name": "qwen2.5-instruct", "model_engine": "transformers"},
    ],
)
def test_a_second_checkpoint_is_answered_as_by_a_xinference_without_room(serving, asked):
    answer = httpx.post(f"{serving[1].url}/v1/models", json=asked)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["type"] == "service_unavailable"
    assert error["param"] == "model_path"
    assert f"this server runs {serving[2]!r}" in error["message"]
    assert "start a second cb-rollout serve with yours, on another --port" in error["message"]
    assert error["message"] in answer.json()["detail"]


def test_a_link_to_the_checkpoint_is_not_followed(serving, xinference, tmp_path):
    os.symlink(serving[2], tmp_path / "link")
    with pytest.raises(RuntimeError, match="loads no other model"):
        xinference.launch_model("mine", model_path=str(tmp_path / "link"))


def test_chats_and_completions_have_the_servers_tokens(serving, launched):
    chat = launched.chat(HELLO, generate_config=GREEDY)
    plain = {"model": "tiny", "messages": HELLO, **GREEDY}
    expected = httpx.post(f"{serving[1].base_url}/chat/completions", json=plain).json()
    assert chat["choices"] == expected["choices"]
    assert chat["usage"] == expected["usage"]
    assert chat["model"] == "qwen-chat"
    chunks = list(launched.chat(HELLO, generate_config=GREEDY | {"stream": True}))
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == chat["choices"][0]["message"]["content"]
    whole = launched.generate("ab", generate_config=GREEDY)["choices"][0]["text"]
    parts = launched.generate("ab", generate_config=GREEDY | {"stream": True})
    assert "".join(part["choices"][0]["text"] for part in parts) == whole


def test_tools_are_called(generator, launched):
    let_say(generator, CALL)
    message = launched.chat(HELLO, tools=[WEATHER])["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Ulm"}'}


def test_a_refused_request_says_why(launched):
    with pytest.raises(RuntimeError, match="temperature=-1"):
        launched.chat(HELLO, generate_config={"temperature": -1})
    with pytest.raises(RuntimeError, match="lora_name: Extra inputs"):
        launched.generate("a", generate_config={"lora_name": "a"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_aborted_by_its_id(serving, xinference, launched, stream):
    config = ENDLESS | {"request_id": f"r{stream}", "stream": stream}
    if stream:
        chunks = launched.chat(HELLO, generate_config=config)
        next(chunks)
        assert xinference.abort_request("qwen-chat", f"r{stream}") == {"msg": "DONE"}
        *_, last = chunks
        assert last["choices"][0]["finish_reason"] == "abort"
        return
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(launched.chat(HELLO, generate_config=config))
    )
    asking.start()
    until(lambda: serving[1].model.output_router.num_in_flight == 1)
    assert xinference.abort_request("qwen-chat", f"r{stream}", block_duration=0)["msg"] == "DONE"
    asking.join(TIMEOUT_SECONDS)
    assert answers[0]["choices"][0]["finish_reason"] == "abort"


def test_an_aborted_id_is_blocked_for_requests_that_come_later(xinference, launched):
    assert xinference.abort_request("qwen-chat", "late") == {"msg": "NOT_FOUND"}
    answer = launched.chat(HELLO, generate_config=ENDLESS | {"request_id": "late"})
    assert answer["choices"][0]["finish_reason"] == "abort"
    other = launched.chat(HELLO, generate_config=GREEDY | {"request_id": "other"})
    assert other["choices"][0]["finish_reason"] == "length"
    # Without a duration nothing is blocked.
    xinference.abort_request("qwen-chat", "next", block_duration=0)
    answer = launched.chat(HELLO, generate_config=GREEDY | {"request_id": "next"})
    assert answer["choices"][0]["finish_reason"] == "length"
    with pytest.raises(RuntimeError, match="the model 'nobody' does not exist"):
        xinference.abort_request("nobody", "late")


def test_a_key_is_asked_for_and_sent():
    with served(api_key="s3cret") as (_, server):
        with_key = RESTfulClient(server.url, api_key="s3cret")
        assert set(with_key.list_models()) == {"policy"}
        without = RESTfulClient(server.url)
        with pytest.raises(RuntimeError, match="the API key is missing or wrong"):
            without.list_models()
        for client in (with_key, without):
            client.close()
