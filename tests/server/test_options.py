import dataclasses

import pytest
from tiny import byte_tokenizer, tiny_model

from cb_rollout import ConfigurationError, RolloutGenerator
from cb_rollout.server import ServerOptions
from cb_rollout.server.options import is_loopback
from cb_rollout.tools.cli import create_parser, main


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(ConfigurationError, match="set api_key, or host='127"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, api_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_a_loopback_address_needs_no_key(host):
    assert is_loopback(host)
    ServerOptions(host=host)


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1}, {"port": 65536}, {"port": True}, {"port": "80"}, {"host": ""},
        {"model_name": ""}, {"max_body_bytes": 0}, {"max_sequences": 1.5},
        {"max_prompt_tokens": 0}, {"request_timeout_seconds": 0},
        {"body_timeout_seconds": float("inf")}, {"api_key": ""}, {"api_key": "sch\u00f6n"},
        {"api_key": 3},
    ],
)  # fmt: skip
def test_a_value_out_of_its_range_is_refused_by_name(values):
    with pytest.raises(ConfigurationError, match=next(iter(values))):
        ServerOptions(**values)


def test_the_key_is_not_in_the_repr():
    assert "hush" not in repr(ServerOptions(api_key="hush"))


def test_the_command_line_has_every_option_and_refuses_before_it_loads(capsys, monkeypatch):
    arguments = vars(create_parser().parse_args(["serve", "m", "--api-key", "k", "--port", "1"]))
    assert (arguments["api_key"], arguments["port"], arguments["max_queue_size"]) == ("k", 1, 1024)
    help_text = create_parser().format_help()
    assert "serve" in help_text
    assert main(["serve", "/not/there", "--host", "0.0.0.0"]) == 2
    assert (
        "--host 0.0.0.0 can be reached from other machines; set --api-key, or --host 127.0.0.1."
        in capsys.readouterr().err
    )
    assert main(["serve", "/not/there", "--api-key", ""]) == 2
    assert "--api-key is empty" in capsys.readouterr().err
    monkeypatch.setenv("CB_ROLLOUT_API_KEY", "k")
    assert main(["serve", "/not/there", "--host", "0.0.0.0"]) == 2
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    printed = capsys.readouterr().out
    for field in dataclasses.fields(ServerOptions):
        assert f"--{field.name.replace('_', '-')}" in printed


def test_a_server_that_cannot_start_raises_before_it_starts():
    generator = RolloutGenerator(tiny_model(vocab_size=259))
    with generator, pytest.raises(ConfigurationError, match="needs the model's tokenizer"):
        generator.serve(port=0)
    with pytest.raises(ConfigurationError, match=r"no field 'prot'; did you mean 'port'"):
        generator.serve(prot=1)
    generator = RolloutGenerator(tiny_model(vocab_size=259), tokenizer=byte_tokenizer())
    with generator, generator.serve(port=0) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"port={port} cannot be bound"):
            generator.serve(port=port)
        with pytest.raises(ConfigurationError, match="cannot be bound"):
            generator.serve(host="203.0.113.1", port=0, api_key="k")
