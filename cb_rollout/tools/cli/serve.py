"""`cb-rollout serve`: serve a checkpoint to OpenAI clients until a signal ends the process."""

import argparse
import dataclasses
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.server.options import ServerOptions
from cb_rollout.tools.cli.command import add_fields, real_number, whole_number
from cb_rollout.tools.dataset.options import DatasetOptions

DESCRIPTION = """\
Serve a checkpoint to OpenAI clients: /v1/chat/completions, /v1/responses, /v1/completions,
/v1/models, /health, /metrics. Listens on this machine only, unless --host says otherwise, which
takes a key. Xinference's client may launch MODEL by its path."""

# The default of `launch_model` in Xinference 2.
XINFERENCE_MAX_NUM_SEQS = 16
XINFERENCE_VARIABLE = "XINFERENCE_TRANSFORMERS_ENABLE_BATCHING"

# Every user of the machine can read a key given on the command line.
KEY_VARIABLE = "CB_ROLLOUT_API_KEY"


def add_serve(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "serve", help="serve a checkpoint to OpenAI clients", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="A checkpoint's directory or hub name.")
    notes = {
        "model_name": " (MODEL's own name)",
        "api_key": f" Or in the environment, as {KEY_VARIABLE}.",
    }
    add_fields(parser, ServerOptions, notes)
    text = "Most sequences that may wait; one more is answered 429. 0: unlimited. (1024)"
    parser.add_argument("--max-queue-size", type=whole_number, default=1024, help=text)
    text = "Most tokens of a request, prompt included. (as many as the model and the memory allow)"
    parser.add_argument("--max-model-len", type=whole_number, help=text)
    parser.add_argument(
        "--seed", type=whole_number, help="Of requests that name none (fresh draws)."
    )
    text = "Export traces and metrics by OpenTelemetry, where the OTEL_* variables say."
    parser.add_argument("--otel", dest="is_traced", action="store_true", help=text)
    names = ("max_num_seqs", "max_memory_percent", "dtype", "device")
    add_fields(parser, DatasetOptions, names=names)
    # None means that the option was not given; then its synonym applies.
    parser.set_defaults(max_memory_percent=None)
    _add_transformers_options(parser)
    parser.add_argument(
        "--xinference",
        action="store_true",
        help=f"Take Xinference's default: --max-num-seqs {XINFERENCE_MAX_NUM_SEQS}. "
        f"{XINFERENCE_VARIABLE}=1 in the environment does the same.",
    )
    parser.set_run(_run)


def _add_transformers_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `transformers serve` for continuous batching, under their names there."""
    group = parser.add_argument_group("names of `transformers serve`")
    group.add_argument(
        "--continuous-batching",
        action=argparse.BooleanOptionalAction,
        help="No effect: requests are always batched continuously, and the other is refused.",
    )
    settings = {field.name: field for field in dataclasses.fields(RolloutConfig)}
    for name in ("block_size", "num_blocks", "max_batch_tokens"):
        text = settings[name].metadata["help"]
        if settings[name].default is not None:
            text = f"{text} ({settings[name].default})"
        option = f"--cb-{name.replace('_', '-')}"
        group.add_argument(option, dest=name, type=whole_number, help=text)
    group.add_argument(
        "--cb-max-memory-percent", type=real_number, help="The same as --max-memory-percent."
    )
    group.add_argument(
        "--cb-use-cuda-graph",
        dest="use_cuda_graph",
        action=argparse.BooleanOptionalAction,
        help="Decode under CUDA graphs, or not; left out: where device and model allow.",
    )


def _run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    config = _config(arguments)
    with _telemetry(arguments.is_traced):
        return _serve(arguments, options, config)


def _serve(arguments: argparse.Namespace, options: ServerOptions, config: RolloutConfig) -> int:
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
    from cb_rollout.rollout.generator import RolloutGenerator

    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    signals = _Signals()
    with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        server = generator.serve(**dataclasses.asdict(options))
        print(f"serving {options.model_name} at {server.base_url}", flush=True)
        with _frozen_objects():
            server.run(lambda: signals.num_caught > 0)
            if not signals.num_caught:
                raise RolloutError("the server ended by itself; its log says why.")
            # The first SIGTERM lets running requests finish; Ctrl-C and any second signal do not.
            server.drain(lambda: signals.is_urgent)
    return 0


def _telemetry(is_traced: bool) -> AbstractContextManager[Any]:
    if not is_traced:
        return nullcontext()
    from cb_rollout.integrations import otel

    return otel.export()


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Keep the objects made so far out of garbage collections, which stop every thread."""
    gc.freeze()
    try:
        yield
    finally:
        # The interpreter frees no frozen object at its end, and nanobind reports each as leaked.
        gc.unfreeze()


class _Signals:
    """Counts Ctrl-C and SIGTERM instead of raising."""

    def __init__(self) -> None:
        self.num_caught = 0
        self.is_urgent = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._catch)

    def _catch(self, number: int, _: FrameType | None) -> None:
        self.is_urgent = number == signal.SIGINT or self.num_caught > 0
        self.num_caught += 1


def _config(arguments: argparse.Namespace) -> RolloutConfig:
    """Return the engine's settings, or raise `ConfigurationError` if options conflict."""
    if arguments.continuous_batching is False:
        raise ConfigurationError(
            "--no-continuous-batching cannot be: requests are always batched continuously; "
            "--max-num-seqs 1 runs one at a time."
        )
    settings: dict[str, Any] = {
        "block_size": arguments.block_size,
        "num_blocks": arguments.num_blocks,
        "max_batch_tokens": arguments.max_batch_tokens,
        "max_memory_percent": _max_memory_percent(arguments),
        "use_cuda_graph": arguments.use_cuda_graph,
        "max_requests_per_batch": _max_num_seqs(arguments),
        "max_model_len": arguments.max_model_len,
    }
    # An option that was left out keeps the default of `RolloutConfig`.
    for name in list(settings):
        if settings[name] is None:
            del settings[name]
    return RolloutConfig(
        max_queue_size=arguments.max_queue_size,
        seed=arguments.seed,
        training_reserve_gib=0,
        **settings,
    )


def _max_memory_percent(arguments: argparse.Namespace) -> float | None:
    """Return the cache's share of the free memory; None: neither of the two options was given."""
    ours = arguments.max_memory_percent
    theirs = arguments.cb_max_memory_percent
    if ours is None:
        return theirs
    if theirs is not None and theirs != ours:
        raise ConfigurationError(
            f"--max-memory-percent {ours} and --cb-max-memory-percent "
            f"{theirs} are one setting; give one of them."
        )
    return ours


def _max_num_seqs(arguments: argparse.Namespace) -> int | None:
    """Return the maximum number of sequences decoded together; None: a default for the device."""
    if arguments.max_num_seqs is not None:
        return arguments.max_num_seqs
    asks_xinference = os.environ.get(XINFERENCE_VARIABLE, "0") not in ("", "0")
    if arguments.xinference or asks_xinference:
        return XINFERENCE_MAX_NUM_SEQS
    return None


def _options(arguments: argparse.Namespace) -> ServerOptions:
    options: dict[str, Any] = {}
    for field in dataclasses.fields(ServerOptions):
        if field.name in arguments:
            options[field.name] = getattr(arguments, field.name)
    if "api_key" not in options:
        options["api_key"] = os.environ.get(KEY_VARIABLE) or None
    elif not options["api_key"]:
        raise ConfigurationError("--api-key is empty; give a key, or leave it out.")
    if "model_name" not in options:
        options["model_name"] = os.path.basename(arguments.model.rstrip("/")) or "policy"
    return ServerOptions(**options)
