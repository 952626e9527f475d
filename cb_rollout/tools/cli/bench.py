"""`cb-rollout bench`: time a rollout beside other generators on this machine.

Owns the options, which the workloads of a checkout's `scripts/bench.py` share.
"""

import argparse
from pathlib import Path
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import CommandParser, require_packages, require_writable

PACKAGES = ("psutil", "tokenizers", "torch", "transformers")

# The module of their sizes loads torch.
MODELS = ("small", "135m", "0.6b")

# Default directory of the record.
OUTPUT_DIR = Path("cb_rollout_bench")

DESCRIPTION = """\
Time a rollout, prompts in and completions out, beside its peers, and write what was measured as
JSON. Models have random weights; nothing is downloaded. All contenders run in this process. A
checkout has more workloads, and vLLM: `python scripts/bench.py --help`.

Contenders take turns, so that a slow spell of the machine meets all of them; figures are medians
over the repetitions, and only ratios within one run mean anything."""


def add_bench(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser("bench", help="time a rollout beside its peers")
    parser.description = DESCRIPTION
    names = {"choices": ("rollout",), "default": "rollout", "metavar": "NAME"}
    parser.add_argument("workload", nargs="?", help="rollout", **names)
    add_options(parser, OUTPUT_DIR)
    parser.set_run(_run)


def add_options(parser: CommandParser, output_dir: Path) -> None:
    """Add the options of a workload; `output_dir` is the default directory of its record."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "turns of each contender (3)"
    parser.add_argument("--repetitions", type=int, metavar="N", default=3, help=text)
    text = "of model.generate (each workload's own)"
    parser.add_argument("--batch-size", type=int, metavar="N", help=text)
    devices, text = ("auto", "cpu", "cuda"), "auto: a GPU where there is one"
    parser.add_argument("--device", choices=devices, default="auto", help=text)
    text = (
        "where NAME_DEVICE.json, with --model NAME_MODEL_DEVICE.json, is written over an older "
        f"one; made if missing ({output_dir})"
    )
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help=text)
    either = parser.add_mutually_exclusive_group()
    text = "sizes of the model and the workload (small on a CPU, 0.6b on a GPU)"
    either.add_argument("--model", choices=MODELS, help=text)
    text = "see whether a workload runs; its figures say nothing of speed"
    either.add_argument("--tiny", action="store_true", help=text)


def checked_folder(name: str, arguments: argparse.Namespace, output_dir: Path) -> Path:
    """Check the options of a workload, and return the folder of its record."""
    folder = arguments.output_dir or output_dir
    for option in ("repetitions", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} {value} is below 1.")
    if arguments.tiny and arguments.output_dir is None:
        raise ConfigurationError("--tiny says nothing of speed; give it an --output-dir.")
    require_packages(f"the bench {name!r}", PACKAGES, "cb_rollout")
    require_writable(folder)
    return folder


def _run(arguments: argparse.Namespace) -> int:
    folder = checked_folder("rollout", arguments, OUTPUT_DIR)
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.bench.run import run_rollout

    print(f"\nwritten to {run_rollout(arguments, folder)}")
    return 0
