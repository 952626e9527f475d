"""Weight updates over HTTP: never a mixture, and one policy version for each."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
import torch
from documented import block, run
from safetensors.torch import save_file
from served import TIMEOUT_SECONDS, Asked, idle, running, served, until
from tiny import byte_tokenizer, plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator
from cb_rollout.errors import WeightSyncError
from cb_rollout.server.middleware import is_own_user
from cb_rollout.server.rl.staged_weights import StagedWeights
from cb_rollout.server.rl.weight_group import WeightGroup

TOKENIZER = byte_tokenizer()
PROMPT = [5, 6, 7]

# A trainer that dies in the middle of its broadcasts.
KILLED = """
import os, signal, sys, threading
import httpx
from safetensors.torch import load_file
from cb_rollout.server.rl.weight_group import WeightGroup

url, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tensors = load_file(path)
info = {"backend": "gloo", "master_address": "127.0.0.1", "master_port": port}
described = {
    "names": list(tensors),
    "dtype_names": ["float32"] * len(tensors),
    "shapes": [list(tensor.shape) for tensor in tensors.values()],
}
def post(path, body):
    httpx.post(url + path, json=body, timeout=60)
threading.Thread(target=post, args=("/init_weight_transfer_engine", {"init_info": info})).start()
group = WeightGroup.join("127.0.0.1", port, 0, 2, 60)
post("/start_weight_update", {})
threading.Thread(target=post, args=("/update_weights", {"update_info": described})).start()
for tensor in list(tensors.values())[: len(tensors) // 2]:
    group.broadcast(tensor)
os.kill(os.getpid(), signal.SIGKILL)
"""


def model_of(seed):
    return tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=4096, seed=seed)


def tensors_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module", params=["shared", pytest.param("copy", marks=pytest.mark.slow)])
def serving(request):
    config = RolloutConfig(seed=0, block_size=16, weight_sync=request.param)
    with served(config, model_of(0), allow_weight_updates=True) as (generator, server):
        yield generator, server


@pytest.fixture
def post(serving):
    generator, server = serving

    def send(path, body=None, **params):
        return httpx.post(f"{server.url}{path}", json=body, params=params, timeout=TIMEOUT_SECONDS)

    yield send
    # Whatever was refused, the next update begins.
    refused = send("/update_weights", {"weight_dir": "/not/there"})
    assert "is no .safetensors file" in refused.json()["error"]["message"]
    assert send("/finish_weight_update").status_code == 409
    assert idle(generator)
    assert generator.manager.engine.num_blocks_used == 0


@pytest.fixture
def file_of(tmp_path):
    def save(tensors, name="model"):
        path = tmp_path / f"{name}.safetensors"
        save_file({key: value.contiguous() for key, value in tensors.items()}, path)
        return str(path)

    return save


def generates_as(serving, model):
    """Return whether a new answer has the log-probabilities of a model."""
    (output,) = serving[0].generate_batch([PROMPT], max_new_tokens=6).values()
    plain = plain_logprobs(model, PROMPT, output.generated_tokens)
    return output.logprobs == pytest.approx(plain, abs=1e-5)


def same_weights(generator, tensors):
    return all(
        torch.equal(parameter, tensors[name])
        for name, parameter in generator.manager.model.named_parameters()
    )


def test_four_phases_from_a_file_make_one_policy_version(serving, post, file_of):
    generator, _ = serving
    before, wanted = generator.policy_version, model_of(1)
    path = file_of(tensors_of(wanted))
    assert post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    assert post("/start_weight_update", {"is_checkpoint_format": True}).status_code == 200
    answer = post("/update_weights", {"update_info": {"weight_dir": path}})
    assert answer.json()["num_tensors"] == len(tensors_of(wanted))
    assert generator.policy_version == before
    assert not generates_as(serving, wanted)
    report = post("/finish_weight_update", {"weight_version": "step-7"}).json()
    assert report["policy_version"] == generator.policy_version == before + 1
    assert generates_as(serving, wanted)
    info = httpx.get(f"{serving[1].url}/server_info", params={"config_format": "json"}).json()
    assert info["weight_version"] == "step-7"
    assert info["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}


@pytest.mark.parametrize("loads", [False, True], ids=["as it is", "through transformers"])
def test_a_directory_replaces_the_weights_in_one_call_of_prime_rl(
    loads, serving, post, tmp_path, monkeypatch
):
    if loads:
        monkeypatch.setattr(StagedWeights, "needs_conversion", lambda *_: True)
    generator, _ = serving
    before, wanted = generator.policy_version, model_of(2 + loads)
    wanted.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert post("/pause", mode="keep", clear_cache="false").status_code == 200
    answer = post("/update_weights", {"weight_dir": str(tmp_path)})
    assert answer.json()["status"] == "ok"
    assert post("/resume").status_code == 200
    assert generator.policy_version == before + 1
    assert generates_as(serving, wanted)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Trainer:
    """Rank 0 of a group, which broadcasts on a thread of its own."""

    def __init__(self, post, **more):
        self.address = ("127.0.0.1", free_port())
        self._post = post
        join = threading.Thread(target=self._join)
        join.start()
        host, port = self.address
        info = {"backend": "gloo", "master_address": host, "master_port": port, **more}
        answer = post("/init_weight_transfer_engine", {"init_info": info})
        assert answer.status_code == 200, answer.text
        join.join(TIMEOUT_SECONDS)

    def _join(self):
        self.group = WeightGroup.join(*self.address, 0, 2, TIMEOUT_SECONDS)

    def send(self, tensors, broadcasts=None, **more):
        """Announce tensors, and broadcast them or what is given instead."""
        thread = threading.Thread(target=self._broadcast, args=(broadcasts or tensors.values(),))
        thread.start()
        answer = self._post("/update_weights", {"update_info": {**described(tensors), **more}})
        thread.join(TIMEOUT_SECONDS)
        return answer

    def _broadcast(self, tensors):
        for tensor in tensors:
            self.group.broadcast(tensor.clone())


def described(tensors):
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def test_a_group_broadcasts_tensors(serving, post):
    wanted = model_of(3)
    tensors = tensors_of(wanted)
    trainer = Trainer(post)
    for _ in range(2):
        assert post("/start_weight_update").status_code == 200
        assert trainer.send(tensors).status_code == 200
        assert post("/finish_weight_update").status_code == 200
    assert generates_as(serving, wanted)
    assert post("/shutdown_weight_transfer_engine").status_code == 200


def test_the_pages_trainer_broadcasts_its_weights(serving, post, monkeypatch):
    wanted, url = model_of(5), serving[1].url
    source = block("Weight updates", "docs/serving.md").replace("29600", str(free_port()))
    monkeypatch.setenv("CB_ROLLOUT_API_KEY", "a key that a server without one ignores")
    run(source.replace("http://127.0.0.1:8000", url), {"model": wanted})
    assert generates_as(serving, wanted)
    assert post("/shutdown_weight_transfer_engine").status_code == 200


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_the_pages_training_loop_serves_the_weights_of_its_last_step(weight_sync):
    model, found = model_of(0), []

    def play(base_url):
        generator = names["generator"]
        found.append((generator.policy_version, same_weights(generator, tensors_of(model))))

    names = {
        "RolloutGenerator": RolloutGenerator,
        "model": model,
        "config": RolloutConfig(seed=0, block_size=16, weight_sync=weight_sync),
        "tokenizer": TOKENIZER,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "num_steps": 2,
        "play": play,
        "loss": lambda model, trajectories: model(torch.tensor([PROMPT])).logits.square().mean(),
    }
    run(block("Serving the policy", "docs/serving.md"), names)
    assert [is_same for _, is_same in found] == [True, True]
    assert found[1][0] > found[0][0]


def refused_updates(tensors, save, tmp_path):
    """Yield the information of updates that are refused, each with the words that say so."""
    first = next(iter(tensors))
    cut = save(tensors, "cut")
    with open(cut, "r+b") as opened:
        opened.truncate(5000)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "empty").mkdir()
    yield {"weight_dir": cut}, "cut off"
    yield {"weight_dir": str(tmp_path / "pytorch_model.bin")}, "is no .safetensors file"
    yield {"weight_dir": str(tmp_path / "empty")}, "is no .safetensors file"
    yield {"weight_dir": str(tmp_path / "none")}, "is no .safetensors file"
    yield {"weight_dir": save({**tensors, "other": torch.ones(2)}, "more")}, "other: not in"
    wrong = {**tensors, first: torch.ones(2, 3)}
    yield {"weight_dir": save(wrong, "shape")}, rf"{first}: \(2, 3\) was sent"
    wrong = {**tensors, first: tensors[first].long()}
    yield {"weight_dir": save(wrong, "dtype")}, "int64 was sent"
    yield described(tensors), "no group"
    yield {"names": ["a"], "dtype_names": [], "shapes": [[1]]}, "length"


def test_a_refused_update_says_why_and_leaves_the_old_weights(serving, post, file_of, tmp_path):
    generator, _ = serving
    kept = {name: value.clone() for name, value in tensors_of(generator.manager.model).items()}
    version = generator.policy_version
    for info, said in refused_updates(tensors_of(model_of(4)), file_of, tmp_path):
        assert post("/start_weight_update").status_code == 200
        answer = post("/update_weights", {"update_info": info})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "the weight update was dropped" in message
        assert re.search(said, message), message
        answer = post("/finish_weight_update")
        assert answer.status_code == 409
        assert f"policy version {version}" in answer.json()["error"]["message"]
        assert same_weights(generator, kept)
    assert generator.policy_version == version


def test_a_missing_tensor_is_refused_unless_the_update_is_partial(serving, post, file_of):
    generator, _ = serving
    tensors = tensors_of(model_of(5))
    name = list(tensors)[-1]
    rest = file_of({key: value for key, value in tensors.items() if key != name})
    old = tensors_of(generator.manager.model)[name].clone()
    for partial, status in [(False, 400), (True, 200)]:
        post("/start_weight_update", {"partial": partial})
        assert post("/update_weights", {"update_info": {"weight_dir": rest}}).status_code == 200
        answer = post("/finish_weight_update")
        assert answer.status_code == status
        if not partial:
            assert f"were not sent: {name}" in answer.json()["error"]["message"]
    assert same_weights(generator, {**tensors, name: old})


def test_tied_tensors_with_different_values_are_refused():
    model = tiny_model(tie_word_embeddings=True)
    value = model.lm_head.weight.detach()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    staged = StagedWeights(model)
    staged.add([("lm_head.weight", value), ("model.embed_tokens.weight", value.clone())])
    staged = StagedWeights(model)
    with pytest.raises(WeightSyncError, match=r"embed_tokens\.weight and lm_head\.weight are one"):
        staged.add([("model.embed_tokens.weight", value), ("lm_head.weight", value + 1)])


def test_a_second_trainer_is_refused_until_the_first_ends_or_is_silent(
    serving, post, file_of, monkeypatch
):
    path = file_of(tensors_of(model_of(6)))
    info = {"update_info": {"weight_dir": path}}
    first = {"update_id": post("/start_weight_update").json()["update_id"]}
    for path_, body in [
        ("/start_weight_update", None),
        ("/update_weights", {"weight_dir": path}),
        ("/update_weights", {**info, "update_id": "other"}),
        ("/finish_weight_update", {"update_id": "other"}),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/shutdown_weight_transfer_engine", None),
    ]:
        assert post(path_, body).status_code == 409, path_
    assert post("/update_weights", {**info, **first}).status_code == 200
    assert post("/finish_weight_update", first).status_code == 200
    updates = serving[1].model.weights
    with monkeypatch.context() as patch:
        patch.setattr(updates, "_seconds", 0.5)
        stale = {"update_id": post("/start_weight_update").json()["update_id"]}
        assert post("/update_weights", {**info, **stale}).status_code == 200
    # It is dropped, with its tensors, without another trainer.
    until(lambda: updates._open is None)
    second = {"update_id": post("/start_weight_update").json()["update_id"]}
    for path_, body in [("/update_weights", {**info, **stale}), ("/finish_weight_update", stale)]:
        assert post(path_, body).status_code == 409
    assert post("/update_weights", {**info, **second}).status_code == 200
    assert post("/finish_weight_update", second).status_code == 200


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_the_old_weights_and_the_next_update_works(
    serving, post, file_of
):
    generator, server = serving
    kept = {name: value.clone() for name, value in tensors_of(generator.manager.model).items()}
    version, wanted = generator.policy_version, model_of(12)
    path = file_of(tensors_of(wanted))
    arguments = [sys.executable, "-c", KILLED, server.url, str(free_port()), path]
    assert subprocess.run(arguments, timeout=TIMEOUT_SECONDS).returncode == -signal.SIGKILL
    until(lambda: "cut off" in post("/finish_weight_update").json()["error"]["message"])
    assert same_weights(generator, kept)
    assert generator.policy_version == version
    trainer = Trainer(post)
    assert post("/start_weight_update").status_code == 200
    assert trainer.send(tensors_of(wanted)).status_code == 200
    assert post("/finish_weight_update").status_code == 200
    assert generates_as(serving, wanted)


@pytest.mark.slow
def test_tokens_around_an_update_have_the_logprobs_of_their_versions(serving, post, file_of):
    generator, _ = serving
    models = {}
    for seed in (7, 8, 9):
        models[seed] = model_of(seed)
    path = file_of(tensors_of(models[7]))
    assert post("/update_weights", {"weight_dir": path}).status_code == 200
    version = generator.policy_version
    names = {version: models[7]}
    asked = [Asked(post, f"r{n}", max_tokens=600, seed=n) for n in range(8)]
    for seed in (8, 9):
        running(generator, 8)
        path = file_of(tensors_of(models[seed]), f"m{seed}")
        assert post("/update_weights", {"weight_dir": path}).status_code == 200
        names[generator.policy_version] = models[seed]
    num_mixed = 0
    for each in asked:
        choice = each.choice()
        tokens, runs = choice["token_ids"], choice["policy_versions"]
        assert sum(count for _, count in runs) == len(tokens) == 600
        assert [v for v, _ in runs] == sorted({v for v, _ in runs})
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        start = 0
        for v, count in runs:
            plain = plain_logprobs(names[v], [5, 6], tokens)[start : start + count]
            assert logprobs[start : start + count] == pytest.approx(plain, abs=1e-5)
            start += count
        num_mixed += len(runs) > 1
    assert num_mixed == 8


def test_a_client_may_have_running_requests_aborted(serving, post, file_of):
    asked = Asked(post, "ended")
    running(serving[0], 1)
    post("/start_weight_update")
    path = file_of(tensors_of(model_of(10)))
    assert post("/update_weights", {"update_info": {"weight_dir": path}}).status_code == 200
    assert post("/finish_weight_update", {"in_flight": "abort"}).status_code == 200
    asked.join()
    assert asked.answer.status_code == 503


def test_a_write_that_fails_keeps_the_engine_until_all_is_written(
    serving, post, file_of, monkeypatch
):
    generator, _ = serving
    wanted = model_of(11)
    path, write = file_of(tensors_of(wanted)), StagedWeights.write

    def broken(staged):
        with torch.no_grad():
            staged._targets["model.norm.weight"].zero_()
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(StagedWeights, "write", broken)
    assert post("/update_weights", {"weight_dir": path}).status_code == 500
    monkeypatch.setattr(StagedWeights, "write", write)
    before = generator.manager.counters.tokens_generated
    post("/resume")
    refused = Asked(post, "refused", max_tokens=4)
    refused.join()
    for answer in (refused.answer, httpx.get(f"{serving[1].url}/health")):
        assert answer.status_code == 503
        assert "update the weights again" in answer.json()["error"]["message"]
    part = file_of({"model.norm.weight": torch.ones_like(wanted.model.norm.weight)}, "part")
    post("/start_weight_update", {"partial": True})
    assert post("/update_weights", {"update_info": {"weight_dir": part}}).status_code == 200
    answer = post("/finish_weight_update")
    assert answer.status_code == 400
    assert "may have left half written" in answer.json()["error"]["message"]
    assert generator.manager.counters.tokens_generated == before
    assert post("/update_weights", {"weight_dir": path}).status_code == 200
    assert httpx.get(f"{serving[1].url}/health").status_code == 200
    assert generates_as(serving, wanted)


@contextmanager
def short_calls(server):
    """Cancel every call after some tenths of a second."""
    options, short = server.model.options, {"request_timeout_seconds": 0.3}
    short["body_timeout_seconds"] = 0.1
    kept = {name: getattr(options, name) for name in short}
    for name, value in short.items():
        object.__setattr__(options, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            object.__setattr__(options, name, value)


def test_a_write_that_outlasts_its_call_is_reported_as_written(serving, post, file_of, monkeypatch):
    generator, server = serving
    wanted, version = model_of(13), generator.policy_version
    path, write = file_of(tensors_of(wanted)), StagedWeights.write
    goes_on = threading.Event()

    def slow(staged):
        goes_on.wait(TIMEOUT_SECONDS)
        write(staged)

    monkeypatch.setattr(StagedWeights, "write", slow)
    assert post("/start_weight_update").status_code == 200
    assert post("/update_weights", {"update_info": {"weight_dir": path}}).status_code == 200
    with short_calls(server):
        answer = post("/finish_weight_update", {"weight_version": "late"})
    assert answer.status_code == 503
    assert "still runs" in post("/finish_weight_update").json()["error"]["message"]
    goes_on.set()
    until(lambda: generator.policy_version == version + 1)
    until(lambda: "is finished" in post("/finish_weight_update").json()["error"]["message"])
    info = httpx.get(f"{server.url}/server_info").json()
    assert info["weight_version"] == "late"
    assert generates_as(serving, wanted)


def test_nccl_and_packed_broadcasts_are_refused_in_one_sentence(post):
    info = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for more in ({}, {"backend": "gloo", "packed": True}):
        answer = post("/init_weight_transfer_engine", {"init_info": {**info, **more}})
        assert answer.status_code == 400
        assert "not over NCCL" in answer.json()["error"]["message"]


def test_weights_are_refused_where_they_are_not_allowed():
    with served() as (_, server):
        for path, body in [
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", None),
            ("/update_weights", {"weight_dir": "/"}),
            ("/update_weights", {}),
            ("/finish_weight_update", None),
        ]:
            answer = httpx.post(f"{server.url}{path}", json=body)
            assert answer.status_code == 403
            assert "--allow-weight-updates" in answer.json()["error"]["message"]


def test_a_model_with_adapters_takes_no_weights():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(0), LoraConfig(target_modules=["q_proj"]))
    with (
        RolloutGenerator(model, RolloutConfig(), tokenizer=TOKENIZER) as generator,
        pytest.raises(ConfigurationError, match="serve a plain model"),
    ):
        generator.serve(port=0, allow_weight_updates=True)


def connections_of(path, *lines):
    path.write_text("\n".join(["  sl  local_address rem_address   st", *lines]))
    return [path, path.with_name("absent")]


def line(local, remote, state, user):
    return f" 0: 0100007F:{local} 0100007F:{remote} {state} 0:0 00:00000000 0 {user} 0 12 1 0"


def test_a_connections_user_is_that_of_linuxs_list(tmp_path):
    scope = {"client": ("127.0.0.1", 0x9DA3), "server": ("127.0.0.1", 0x8024)}
    mine, servers = line("9DA3", "8024", "01", 7), line("8024", "9DA3", "01", 0)
    others, old = line("9DA3", "8024", "01", 8), line("9DA3", "8024", "06", 0)
    for lines, users in (
        ([servers, mine, old], {7}), ([servers, others], {8}), ([servers], set()),
        ([mine, others], set()), ([], set()),
    ):  # fmt: skip
        lists = connections_of(tmp_path / "tcp", *lines)
        assert {user for user in (0, 7, 8) if is_own_user(scope, lists, user)} == users
    assert not is_own_user({"client": None, "server": None}, lists, 7)


# As another user of the machine.
STRANGER = """
import os, socket, sys
# Loads the encoding of names while this user may.
socket.getaddrinfo("127.0.0.1", 0)
os.setuid(65534)
for path in ("/start_weight_update", "/resume"):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as client:
        client.sendall(f"POST {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n".encode())
        print(client.recv(1000).split()[1].decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_updates_no_weights_without_a_key(serving):
    _, server = serving
    command = [sys.executable, "-c", STRANGER, server.url.rpartition(":")[2]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["401", "200"]
