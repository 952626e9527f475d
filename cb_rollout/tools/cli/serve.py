"""`cb-rollout serve`: serve a checkpoint to OpenAI clients until a signal ends the process."""

import argparse
import dataclasses
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.server.options import ServerOptions
from cb_rollout.tools.cli.command import add_fields, whole_number
from cb_rollout.tools.dataset.options import DatasetOptions

DESCRIPTION = """\
Serve a checkpoint to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models, /health,
/metrics. Listens on this machine only, unless --host says otherwise, which takes a key."""

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
    parser.add_argument(
        "--seed", type=whole_number, help="Of requests that name none (fresh draws)."
    )
    names = ("max_num_seqs", "max_memory_percent", "dtype", "device")
    add_fields(parser, DatasetOptions, names=names)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    config = RolloutConfig(
        max_requests_per_batch=arguments.max_num_seqs,
        max_queue_size=arguments.max_queue_size,
        max_memory_percent=arguments.max_memory_percent,
        seed=arguments.seed,
        training_reserve_gib=0,
    )
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
        self.num_caught, self.is_urgent = 0, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._catch)

    def _catch(self, number: int, _: FrameType | None) -> None:
        self.is_urgent = number == signal.SIGINT or self.num_caught > 0
        self.num_caught += 1


def _options(arguments: argparse.Namespace) -> ServerOptions:
    names = [field.name for field in dataclasses.fields(ServerOptions)]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    given.setdefault("model_name", os.path.basename(arguments.model.rstrip("/")) or "policy")
    if not given.get("api_key"):
        given["api_key"] = os.environ.get(KEY_VARIABLE) or None
    if "api_key" in vars(arguments) and not arguments.api_key:
        raise ConfigurationError("--api-key is empty; give a key, or leave it out.")
    return ServerOptions(**given)
