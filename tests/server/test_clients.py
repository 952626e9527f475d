"""Trainers' own clients, unmodified, against the server."""

import json
import os
import socket
import subprocess
import threading

import pytest
from accelerate import PartialState
from served import TIMEOUT_SECONDS, served
from tiny import byte_tokenizer, plain_logprobs, tiny_model
from trl.experimental.async_grpo.vllm_client import VLLMClient

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
