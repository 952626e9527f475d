"""`cb-rollout report`: write the HTML report of a run, or a comparison of two runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from cb_rollout.tools.report import write_comparison, write_report


def add_report(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html about a run, from the records it left, beside them; or "
        "comparison.html about two, beside those of the first.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="a trainer's output_dir, or the cb_rollout directory in it",
    )
    parser.add_argument(
        "other_run_dir",
        metavar="RUN_DIR",
        type=Path,
        nargs="?",
        help="a run to compare it with",
    )
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.other_run_dir is None:
        path = write_report(arguments.run_dir)
    else:
        path = write_comparison(arguments.run_dir, arguments.other_run_dir)
    sys.stdout.write(f"{path}\n")
    return 0
