"""The command line, `cb-rollout`: its commands, with their options and exit codes.

A `RolloutError` becomes a line on stderr and exit code 2. Loads no torch before a command does.
"""

import argparse
from collections.abc import Sequence

from cb_rollout import __version__
from cb_rollout.tools.cli.audit import add_audit
from cb_rollout.tools.cli.bench import add_bench
from cb_rollout.tools.cli.command import CommandParser
from cb_rollout.tools.cli.demo import add_demo
from cb_rollout.tools.cli.doctor import add_doctor
from cb_rollout.tools.cli.env import add_env
from cb_rollout.tools.cli.generate import add_generate
from cb_rollout.tools.cli.report import add_report, add_watch
from cb_rollout.tools.cli.serve import add_serve
from cb_rollout.tools.cli.tinker import add_tinker

__all__ = ["create_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; `argv` has the arguments after the program's name; None: the process's own.

    Returns the exit code: 0; 1, the command ran and reports a problem; 2, it could not run; 130,
    it was interrupted.
    """
    arguments = create_parser().parse_args(argv)
    return arguments.run(arguments)


def create_parser() -> argparse.ArgumentParser:
    """Create the parser of every command; a parsed command has its function in `run`."""
    parser = argparse.ArgumentParser(
        prog="cb-rollout", description="Continuous batching inside the training process."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    add_demo(commands)
    add_generate(commands)
    add_serve(commands)
    add_tinker(commands)
    add_bench(commands)
    add_report(commands)
    add_watch(commands)
    add_audit(commands)
    add_doctor(commands)
    add_env(commands)
    return parser
