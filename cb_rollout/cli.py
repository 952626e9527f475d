"""The command line, `cb-rollout`.

Owns options and exit codes; the work is done by the module that a subcommand names. A fault of the
world (`RolloutError`) is one line on stderr and exit code 2. Loads no torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cb_rollout import __version__
from cb_rollout.errors import RolloutError
from cb_rollout.report import write_report

EXIT_FAULT = 2
# The code that argparse gives wrong options, which are faults of the world too.


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments behind the program's name; None: those of the process.

    Returns:
        The exit code: 0, or 2 when the command could not be done.
    """
    arguments = create_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except RolloutError as error:
        sys.stderr.write(f"cb-rollout: {' '.join(str(error).split())}\n")
        return EXIT_FAULT
    return 0


def create_parser() -> argparse.ArgumentParser:
    """The parser of every command; a parsed command carries its function as `run`."""
    parser = argparse.ArgumentParser(
        prog="cb-rollout", description="Continuous batching inside the training process."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    report = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html about a run, from the records it left, beside them.",
    )
    report.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="a trainer's output_dir, or the cb_rollout directory in it",
    )
    report.set_defaults(run=_report)
    return parser


def _report(arguments: argparse.Namespace) -> None:
    sys.stdout.write(f"{write_report(arguments.run_dir)}\n")


if __name__ == "__main__":
    sys.exit(main())
