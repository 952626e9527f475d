"""The command line, `cb-rollout`.

Owns options and exit codes; the work is done by the module that a subcommand names. A fault of the
world (`RolloutError`) is one line on stderr and exit code 2. Loads no torch before a command that
needs it runs.
"""

import argparse
import sys
from collections.abc import Sequence

from cb_rollout import __version__
from cb_rollout.errors import RolloutError
from cb_rollout.tools.cli.bench import add_bench
from cb_rollout.tools.cli.codes import EXIT_FAULT, EXIT_INTERRUPTED
from cb_rollout.tools.cli.demo import add_demo
from cb_rollout.tools.cli.doctor import add_doctor
from cb_rollout.tools.cli.generate import add_generate
from cb_rollout.tools.cli.report import add_report
from cb_rollout.tools.cli.serve import add_serve

__all__ = ["create_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments behind the program's name; None: those of the process.

    Returns:
        The exit code: 0; 1 when the command ran and not all is well; 2 when it could not be done;
        130 when it was interrupted.
    """
    arguments = create_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except RolloutError as error:
        _say(str(error))
        return EXIT_FAULT
    except KeyboardInterrupt as interrupt:
        _say(str(interrupt) or "interrupted.")
        return EXIT_INTERRUPTED


def create_parser() -> argparse.ArgumentParser:
    """The parser of every command; a parsed command carries its function as `run`."""
    parser = argparse.ArgumentParser(
        prog="cb-rollout", description="Continuous batching inside the training process."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_demo(commands)
    add_generate(commands)
    add_serve(commands)
    add_bench(commands)
    add_report(commands)
    add_doctor(commands)
    return parser


def _say(text: str) -> None:
    sys.stderr.write(f"cb-rollout: {' '.join(text.split())}\n")
