"""`cb-rollout bench`: time cb_rollout against other generators on this machine."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import CommandParser, require_packages, require_writable


class BenchCommand(NamedTuple):
    """The module of a function `bench_NAME`, its own packages, and what installs them."""

    module: str
    help: str
    packages: tuple[str, ...] = ()
    requirement: str = "cb_rollout"


ENGINE_PACKAGES = ("psutil", "tokenizers", "torch", "transformers")

# The module of their sizes loads torch.
MODELS = ("small", "135m", "0.6b")

BENCH = "cb_rollout.tools.bench"
TRAINING_PACKAGES = ("datasets", "trl")

DESCRIPTION = """\
Time cb_rollout beside its peers and write what was measured as JSON. Models have random weights;
nothing is downloaded. All contenders run in this process. A checkout has more workloads, and vLLM:
`python scripts/bench.py --help`.

Contenders take turns, so that a slow spell of the machine meets all of them; figures are medians
over the repetitions, and only ratios within one run mean anything."""


class Suite(NamedTuple):
    """Workloads of a command."""

    description: str
    workloads: Mapping[str, BenchCommand]
    sizes: str
    """Module of their sizes."""
    output_dir: Path
    """Default directory of the records."""


SHIPPED = Suite(
    DESCRIPTION,
    {
        "rollout": BenchCommand(f"{BENCH}.rollout", "one rollout: prompts in, completions out"),
        "step": BenchCommand(f"{BENCH}.step", "one GRPO step through TRL", TRAINING_PACKAGES),
    },
    f"{BENCH}.workload",
    Path("cb_rollout_bench"),
)


def add_bench(commands: Any) -> None:
    """Add the command to the command line."""
    add_suite(commands.add_parser("bench", help="time a rollout beside its peers"), SHIPPED)


def add_suite(parser: CommandParser, suite: Suite) -> None:
    """Add the options of a suite's workloads to a parser."""
    workloads = suite.workloads
    width = max(map(len, workloads))
    lines = "".join(f"\n  {name:<{width}}  {x.help}" for name, x in workloads.items())
    parser.description, parser.epilog = suite.description, f"workloads:{lines}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "workload",
        metavar="NAME",
        nargs="?",
        choices=workloads,
        default="rollout",
        help="one of the workloads below (rollout)",
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", default=3, help="turns of each contender (3)"
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="of model.generate (each workload's own)"
    )
    devices, text = ("auto", "cpu", "cuda"), "auto: a GPU where there is one"
    parser.add_argument("--device", choices=devices, default="auto", help=text)
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="where NAME_DEVICE.json, with --model NAME_MODEL_DEVICE.json, is written over an "
        f"older one; made if missing ({suite.output_dir})",
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--model",
        choices=MODELS,
        help="sizes of the model and the workload (small on a CPU, 0.6b on a GPU)",
    )
    either.add_argument(
        "--tiny",
        action="store_true",
        help="see whether a workload runs; its figures say nothing of speed",
    )
    parser.set_run(lambda arguments: _run(arguments, suite))


def _run(arguments: argparse.Namespace, suite: Suite) -> int:
    command, folder = suite.workloads[arguments.workload], arguments.output_dir or suite.output_dir
    for option in ("repetitions", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} {value} is below 1.")
    if arguments.tiny and arguments.output_dir is None:
        raise ConfigurationError("--tiny says nothing of speed; give it an --output-dir.")
    packages = (*ENGINE_PACKAGES, *command.packages)
    require_packages(f"the bench {arguments.workload!r}", packages, command.requirement)
    require_writable(folder)
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.bench.run import run_workload

    path = run_workload(arguments.workload, command.module, suite.sizes, arguments, folder)
    sys.stdout.write(f"\nwritten to {path}\n")
    return 0
