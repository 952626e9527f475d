"""`cb-rollout serve` as a process, from its first line to its exit code."""

import argparse
import inspect
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
from served import client, served
from tiny import byte_tokenizer, tiny_model
from transformers.cli.serve import Serve
from xinference_client import RESTfulClient

from cb_rollout.engine.core import Engine
from cb_rollout.errors import EngineDeadError
from cb_rollout.tools.cli import main, serve
from cb_rollout.tools.cli.command import CommandParser

# Importing torch takes long on a busy machine.
START_SECONDS = 300.0

END_SECONDS = 60.0
HELLO = [{"role": "user", "content": "Hello!"}]
ENDLESS = {"prompt": [5, 6], "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoints") / "tiny"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(path)
    return path


def start(checkpoint, *options):
    command = [sys.executable, "-m", "cb_rollout", "serve", str(checkpoint), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


@contextmanager
def serving(checkpoint, *options):
    """Serve a checkpoint; at the end the process must have been told to end, and have done so."""
    process = start(checkpoint, "--port", "0", *options)
    late = threading.Timer(START_SECONDS, process.kill)
    late.start()
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"serving (\S+) at (http://127\.0\.0\.1:\d+)/v1\n", line)
        assert found, line + process.stderr.read()
        yield SimpleNamespace(
            process=process, name=found[1], url=found[2], base_url=f"{found[2]}/v1"
        )
        out, err = process.communicate(timeout=END_SECONDS)
    finally:
        late.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err
    assert "leaked" not in err


def complete(server, **settings):
    settings = {"prompt": [5, 6], "max_tokens": 2, **settings}
    return client(server).completions.create(model="tiny", **settings)


@pytest.mark.slow
def test_it_answers_its_clients_within_its_limits_until_ctrl_c(checkpoint):
    options = ("--max-num-seqs", "2", "--max-queue-size", "5")
    with serving(checkpoint, *options) as server:
        assert server.name == "tiny"
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok", "policy_version": 0}
        (model,) = client(server).models.list().data
        assert model.id == "tiny"
        chats = client(server).chat.completions
        answer = chats.create(model="tiny", messages=HELLO, max_tokens=8, seed=0)
        assert answer.choices[0].finish_reason in ("length", "stop")
        chunks = list(chats.create(model="tiny", messages=HELLO, max_tokens=8, seed=0, stream=True))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert said == answer.choices[0].message.content
        with pytest.raises(openai.RateLimitError, match="max_queue_size=5"):
            complete(server, n=6)
        stream = iter(complete(server, **ENDLESS, n=5, stream=True))
        next(stream)
        figures = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"^cb_rollout_requests_running 2(\.0)?$", figures, re.MULTILINE)
        assert re.search(r"^cb_rollout_requests_waiting 3(\.0)?$", figures, re.MULTILINE)
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="cancelled by the server"):
            list(stream)


@pytest.mark.slow
def test_on_sigterm_running_requests_finish_and_new_ones_are_refused(checkpoint):
    with serving(checkpoint, "--drain-seconds", "300") as server:
        settings = {**ENDLESS, "max_tokens": 1200}
        stream = iter(complete(server, **settings, stream=True))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code == 200:
            pass
        with pytest.raises(openai.InternalServerError, match="the server is ending") as caught:
            complete(server)
        assert caught.value.status_code == 503
        *_, last = stream
        assert last.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_a_second_signal_does_not_wait(checkpoint):
    with serving(checkpoint, "--drain-seconds", "300") as server:
        stream = iter(complete(server, **ENDLESS, n=64, stream=True))
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code == 200:
            pass
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="cancelled by the server"):
            list(stream)


@pytest.mark.slow
def test_xinferences_client_launches_the_checkpoint_that_is_served(checkpoint):
    options = ("--xinference", "--continuous-batching", "--cb-block-size", "16")
    with serving(checkpoint, *options, "--cb-num-blocks", "300") as server:
        xinference = RESTfulClient(server.url)
        uid = xinference.launch_model("mine", model_path=str(checkpoint), max_num_seqs=16)
        model = xinference.get_model(uid)
        config = {"temperature": 0, "max_tokens": 8}
        said = model.chat(HELLO, generate_config=config)["choices"][0]["message"]["content"]
        chats = client(server).chat.completions
        expected = chats.create(model="tiny", messages=HELLO, **config)
        assert said == expected.choices[0].message.content
        xinference.terminate_model(uid)
        model.close()
        xinference.close()
        figures = httpx.get(f"{server.url}/metrics").text
        assert re.search(r"^cb_rollout_kv_blocks 300(\.0)?$", figures, re.MULTILINE)
        server.process.send_signal(signal.SIGINT)


@pytest.mark.slow
def test_a_port_in_use_is_one_line(checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(checkpoint, "--port", str(port))
        out, err = process.communicate(timeout=START_SECONDS)
    assert (process.returncode, out) == (2, "")
    fault = err.splitlines()[-1]
    assert fault.startswith(f"cb-rollout: --host 127.0.0.1 --port {port} cannot be bound (")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./nowhere"], "'./nowhere' does not exist"),
        (["./nowhere", "--host", "0.0.0.0"], "--host 0.0.0.0 can be reached from other machines"),
        (["./nowhere", "--api-key", ""], "--api-key is empty"),
        (["./nowhere", "--port", "99999"], "--port 99999 is not a whole number"),
        (["./nowhere", "--drain-seconds", "-1"], "--drain-seconds -1.0"),
        (["./nowhere", "--max-num-seqs", "0"], "--max-num-seqs 0 "),
        (["./nowhere", "--cb-block-size", "0"], "--cb-block-size 0 is not"),
        (["./nowhere", "--cb-num-blocks", "0"], "--cb-num-blocks 0 is not"),
        (["./nowhere", "--cb-max-batch-tokens", "0"], "--cb-max-batch-tokens 0 is not"),
        (["./nowhere", "--cb-max-memory-percent", "40"], "--max-memory-percent 40.0 is outside"),
        (["./nowhere", "--no-continuous-batching"], "requests are always batched continuously"),
        (
            ["./nowhere", "--max-memory-percent", "0.5", "--cb-max-memory-percent", "0.4"],
            "--max-memory-percent 0.5 and --cb-max-memory-percent 0.4 are one setting; give one",
        ),
    ],
)
def test_an_error_of_serve_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("CB_ROLLOUT_API_KEY", raising=False)
    assert main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("cb-rollout: ")
    assert said in printed.err.splitlines()[-1]


def config_of(*options):
    """Return the settings that `serve` gives the engine for its options."""
    root = argparse.ArgumentParser()
    serve.add_serve(root.add_subparsers(parser_class=CommandParser))
    return serve._config(root.parse_args(["serve", "./nowhere", *options]))


def test_the_names_of_transformers_serve_are_its_settings():
    names = ("--cb-block-size", "16", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")
    asked = config_of("--continuous-batching", *names, "--no-cb-use-cuda-graph")
    assert (asked.block_size, asked.num_blocks, asked.max_batch_tokens) == (16, 64, 512)
    assert asked.use_cuda_graph is False
    assert config_of("--cb-use-cuda-graph").use_cuda_graph is True
    assert config_of("--cb-max-memory-percent", "0.4").max_memory_percent == 0.4
    both = ("--cb-max-memory-percent", "0.4", "--max-memory-percent", "0.4")
    assert config_of(*both).max_memory_percent == 0.4
    plain = config_of()
    assert (plain.block_size, plain.num_blocks, plain.max_batch_tokens) == (32, None, None)
    assert (plain.max_memory_percent, plain.use_cuda_graph) == (0.8, None)


def test_every_option_for_batching_of_transformers_serve_is_taken(capsys):
    arguments = inspect.signature(Serve.__init__).parameters
    options = [name for name in arguments if name.startswith(("cb_", "continuous_batching"))]
    assert {"cb_block_size", "cb_num_blocks", "cb_max_batch_tokens"} <= set(options)
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    printed = capsys.readouterr().out
    for name in options:
        assert f"--{name.replace('_', '-')}" in printed
    assert "No effect: requests are always batched continuously" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("options", "variable", "expected"),
    [
        ((), None, None),
        ((), "0", None),
        ((), "", None),
        ((), "1", 16),
        (("--xinference",), None, 16),
        (("--xinference",), "0", 16),
        (("--xinference", "--max-num-seqs", "3"), "1", 3),
    ],
)
def test_xinferences_users_get_its_number_of_sequences(options, variable, expected, monkeypatch):
    monkeypatch.delenv(serve.XINFERENCE_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(serve.XINFERENCE_VARIABLE, variable)
    assert config_of(*options).max_requests_per_batch == expected


def test_the_thread_that_waits_for_a_server_steps_the_engine(monkeypatch):
    threads, step = set(), Engine.step

    def watched(self):
        threads.add(threading.current_thread())
        return step(self)

    with served(model_name="tiny") as (_, server):
        monkeypatch.setattr(Engine, "step", watched)
        answers = []
        asking = threading.Thread(target=lambda: answers.append(complete(server, max_tokens=20)))
        asking.start()
        server.run(lambda: not asking.is_alive())
        assert answers
        assert threads == {threading.current_thread()}


def test_the_death_of_the_engine_is_raised_to_the_thread_that_waits_for_its_server(monkeypatch):
    def broken(self):
        raise ZeroDivisionError("broken")

    with served(model_name="tiny") as (_, server):
        monkeypatch.setattr(Engine, "step", broken)

        def ask():
            with pytest.raises(openai.InternalServerError, match="the engine stopped"):
                complete(server)

        asking = threading.Thread(target=ask)
        asking.start()
        with pytest.raises(EngineDeadError, match="broken"):
            server.run(lambda: False)
        asking.join()


def test_requests_that_outlast_a_drain_are_cancelled():
    with served(model_name="tiny", drain_seconds=0) as (_, server):
        stream = iter(complete(server, **ENDLESS, n=8, stream=True))
        next(stream)
        server.drain()
        server.close()
        with pytest.raises(openai.APIError, match="cancelled by the server"):
            list(stream)
