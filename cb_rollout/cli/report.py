"""`cb-rollout report`: a run's records as one page."""

import argparse
import sys
from pathlib import Path
from typing import Any

from cb_rollout.report import write_report


def add_report(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html about a run, from the records it left, beside them.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="a trainer's output_dir, or the cb_rollout directory in it",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    sys.stdout.write(f"{write_report(arguments.run_dir)}\n")
    return 0
