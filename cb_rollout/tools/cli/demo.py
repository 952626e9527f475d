"""`cb-rollout demo`: run the recipe `arithmetic_cpu.py`, which is part of the wheel.

Owns the command's options; the recipe has their defaults.
"""

import argparse
import logging
import math
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import cb_rollout
from cb_rollout.config.enums import Numerics
from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import (
    EXIT_FAULT,
    require_packages,
    require_writable,
    whole_number,
)

# Relative to the package in a wheel, to its parent folder in a checkout.
RECIPE = Path("recipes", "arithmetic_cpu.py")

# The recipe's imports.
PACKAGES = ("datasets", "tokenizers", "torch", "tqdm", "transformers", "trl")


class WholeNumber(NamedTuple):
    """Help, smallest and largest value of an option."""

    help: str
    least: int
    largest: float = math.inf


# numpy limits the seed.
NUMBERS = {
    "seed": WholeNumber("of weights, problems and sampling (0)", 0, 2**32 - 1),
    "max_steps": WholeNumber("GRPO steps (40)", 1),
    "warmup_steps": WholeNumber("supervised steps before them (600)", 0),
    "num_held_out": WholeNumber("problems to measure accuracy with (500)", 1),
}

DESCRIPTION = """\
Train a small model to finish its sums, by GRPO, on a laptop's CPU: about two minutes on
two cores, with no network and no account. Prints held-out accuracy before and after, and writes a
report to open in a browser. Exit code 1: a whole run did not learn what it should have."""


def add_demo(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small model on this machine's CPU",
        description=DESCRIPTION,
        argument_default=argparse.SUPPRESS,
    )
    for name, number in NUMBERS.items():
        flags = [_flag(name)]
        if name == "max_steps":
            flags.append("--steps")
        parser.add_argument(*flags, type=whole_number, metavar="N", help=number.help)
    text = "bitwise: sampled log-probabilities are the trainer's in every bit (fast)"
    parser.add_argument("--numerics", choices=[each.value for each in Numerics], help=text)
    text = "of metrics, records and the report, made if missing (runs/arithmetic)"
    parser.add_argument("--output-dir", metavar="DIR", help=text)
    parser.set_run(_run)


def recipe_path() -> Path:
    """Return the path of the recipe."""
    package = Path(cb_rollout.__file__).parent
    path = package / RECIPE
    return path if path.exists() else package.parent / RECIPE


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_not_of_kernels(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to load CPU gemm_4bit_forward")


def _run(arguments: argparse.Namespace) -> int:
    # `pip install --no-deps` leaves out even the package's own dependencies.
    require_packages("the demo", PACKAGES, "cb_rollout")
    path = str(recipe_path())
    options = dict(vars(arguments))
    del options["run"]
    for name, number in NUMBERS.items():
        value = options.get(name, number.least)
        if value < number.least:
            raise ConfigurationError(f"{_flag(name)} {value} is below {number.least}.")
        if value > number.largest:
            raise ConfigurationError(f"{_flag(name)} {value} is above {number.largest}.")
    if "output_dir" in options:
        require_writable(Path(options["output_dir"]))
    # accelerate imports deepspeed if it is installed; deepspeed then reports that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # peft imports bitsandbytes if it is installed; it then reports that it found no `kernels`.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_not_of_kernels)
    before = sys.argv
    sys.argv = [path]
    for name, value in options.items():
        sys.argv.append(f"{_flag(name)}={value}")
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_FAULT
    finally:
        sys.argv = before
    return 0
