"""`cb-rollout tinker`: serve Tinker's API for a checkpoint until a signal ends the process."""

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.server.options import ServerOptions
from cb_rollout.tools.cli.command import add_fields
from cb_rollout.tools.dataset.options import DatasetOptions

DESCRIPTION = """\
Serve LoRA training and sampling of a checkpoint to Tinker's client (`pip install tinker`): set
TINKER_BASE_URL to the printed address and TINKER_API_KEY to the key. Listens on this machine only,
unless --host says otherwise, which takes a key."""

# Tinker's client reads its key from the same variable.
KEY_VARIABLE = "TINKER_API_KEY"
KEY_PREFIX = "tml-"

# A forward of a long batch takes longer than a chat's answer, and its request body is larger.
DEFAULT_MAX_BODY_BYTES = 256 * 1024**2

POLL_SECONDS = 0.2


def add_tinker(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "tinker", help="serve Tinker's API: train and sample LoRA adapters", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="A checkpoint's directory or hub name.")
    notes = {
        "model_name": " (MODEL, as it is given)",
        "api_key": f" It begins with {KEY_PREFIX}. Or in the environment, as {KEY_VARIABLE}.",
    }
    add_fields(parser, ServerOptions, notes, names=("host", "port", "api_key", "model_name"))
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("tinker_checkpoints"),
        help="Folder for what clients save. (tinker_checkpoints)",
    )
    names = ("max_num_seqs", "max_memory_percent", "dtype", "device")
    add_fields(parser, DatasetOptions, names=names)
    parser.set_defaults(model_name=None)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    if key is not None and not key.startswith(KEY_PREFIX):
        raise ConfigurationError(
            f"the key does not begin with {KEY_PREFIX!r}, and Tinker's client sends no other; "
            f"choose one that does."
        )
    options = ServerOptions(
        host=arguments.host,
        port=arguments.port,
        api_key=key,
        model_name=arguments.model_name or arguments.model,
        max_body_bytes=DEFAULT_MAX_BODY_BYTES,
    )
    config = RolloutConfig(
        max_requests_per_batch=arguments.max_num_seqs,
        max_memory_percent=arguments.max_memory_percent,
    )
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
    from cb_rollout.server.tinker.launch import TinkerServer

    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: signals.append(caught))
    with TinkerServer(model, tokenizer, options, arguments.checkpoints, config) as server:
        print(f"serving {options.model_name} to Tinker's client at {server.url}", flush=True)
        while server.is_running() and not signals:
            time.sleep(POLL_SECONDS)
        if not signals:
            raise RolloutError("the server ended by itself; its log says why.")
    return 0
