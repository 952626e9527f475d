"""Trainers' own clients, unmodified, against the server."""

import json
import os
import socket
import subprocess
import threading

import httpx
import pytest
import torch
from accelerate import PartialState
from served import TIMEOUT_SECONDS, served
from tiny import byte_tokenizer, plain_logprobs, tiny_model
from trl.experimental.async_grpo.vllm_client import VLLMClient
from trl.generation import vllm_client

from cb_rollout.server.rl.weight_group import WeightGroup

# The Python of an environment with `verifiers`, whose dependencies are not this package's.
PYTHON = os.environ.get("CB_ROLLOUT_VERIFIERS_PYTHON")

VERIFIERS = """
import asyncio, json, sys
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

async def main(base_url, tokenizer):
    client = TrainClient(TrainClientConfig(base_url=base_url, renderer_model_name=tokenizer))
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    sampling = SamplingConfig(max_tokens=16, seed=5, extra_body={"cache_salt": "3", "top_k": -1})
    answer = await client.get_response(ChatDialect(), body, sampling, session_id="s")
    await client.close()
    found = answer.tokens
    print(json.dumps([found.prompt_ids, found.completion_ids, found.completion_logprobs]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def serving():
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
    with served(model=model, tokenizer=tokenizer, allow_weight_updates=True) as pair:
        yield pair


@pytest.mark.parametrize("num_top", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_trls_distillation_gets_a_teachers_logprobs(serving, num_top, monkeypatch):
    # The client's own machine needs vLLM for weights alone.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    generator, server = serving
    client = vllm_client.VLLMClient(base_url=server.url)
    rows = [[5, 6, 7, 8, 9], [9, 8, 7], [5, 6, 7, 8, 9]]
    lengths, temperature = [2, 1, 3], 0.7
    # Beside a rollout.
    rollout = threading.Thread(
        target=generator.generate_batch, args=([[5, 6]] * 8,), kwargs={"max_new_tokens": 40}
    )
    rollout.start()
    found = client.get_sequence_logprobs(
        rows, lengths, top_logprobs=num_top, temperature=temperature, chunk_size=2
    )
    rollout.join(TIMEOUT_SECONDS)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        logits = generator.manager.model(input_ids=torch.tensor([row])).logits[0, length - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        top = expected.topk(num_top, -1)
        assert found["logprob_token_ids"][number] == top.indices.tolist()
        values = torch.tensor(found["logprobs"][number])
        torch.testing.assert_close(values, top.values, rtol=0, atol=1e-5)
        assert found["actual_token_ids"][number] == [[token] for token in row[length:]]


def test_each_token_of_a_prompt_has_its_logprob_and_rank(serving):
    generator, server = serving
    prompt = [5, 6, 7, 8]
    body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    choices = httpx.post(f"{server.base_url}/completions", json=body).json()["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, *places = choices[0]["prompt_logprobs"]
    assert first is None
    logprobs = generator.manager.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    for place, own, token in zip(places, logprobs, prompt[1:], strict=False):
        assert place[str(token)]["logprob"] == pytest.approx(own[token].item(), abs=1e-5)
        assert place[str(token)]["rank"] == int((own > own[token]).sum()) + 1
        assert len(place) == 1
    refused = httpx.post(f"{server.base_url}/completions", json=body | {"stream": True})
    assert refused.status_code == 400
    assert "prompt_logprobs are not streamed" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_trls_asynchronous_client_pauses_and_updates_in_four_phases(serving):
    generator, server = serving
    PartialState()
    client = VLLMClient(server.url)
    client.wait_for_server_ready()
    assert client.get_max_model_len() == server.model.max_model_len
    assert client.get_dtype() == "torch.float32"
    assert client.get_server_info()["lora_config"] is None
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    info = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
        "world_size": client.get_world_size() + 1, "backend": "gloo",
    }  # fmt: skip
    calls = threading.Thread(target=client.init_weight_transfer_engine, args=(info,))
    calls.start()
    group = WeightGroup.join("127.0.0.1", port, 0, 2, TIMEOUT_SECONDS)
    calls.join(TIMEOUT_SECONDS)
    wanted = tiny_model(vocab_size=len(byte_tokenizer()), max_position_embeddings=4096, seed=1)
    tensors = {name: tensor.detach() for name, tensor in wanted.named_parameters()}
    described = {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    client.pause()
    client.start_weight_update()
    calls = threading.Thread(target=client.update_weights, args=(described,))
    calls.start()
    for tensor in tensors.values():
        group.broadcast(tensor)
    calls.join(TIMEOUT_SECONDS)
    client.finish_weight_update()
    client.resume()
    assert generator.policy_version == 1
    (output,) = generator.generate_batch([[5, 6]], max_new_tokens=6).values()
    plain = plain_logprobs(wanted, [5, 6], output.generated_tokens)
    assert output.logprobs == pytest.approx(plain, abs=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="CB_ROLLOUT_VERIFIERS_PYTHON names no environment")
def test_the_client_of_verifiers_gets_tokens_with_their_plain_logprobs(serving, tmp_path):
    generator, server = serving
    byte_tokenizer().save_pretrained(tmp_path)
    arguments = [PYTHON, "-c", VERIFIERS, server.base_url, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    prompt, tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    chat = [{"role": "user", "content": "Hello"}]
    assert (
        prompt
        == byte_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )
    plain = plain_logprobs(generator.manager.model, prompt, tokens)
    assert logprobs == pytest.approx(plain, abs=1e-5)
    assert 0 < len(tokens) <= 16
