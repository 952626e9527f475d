"""`cb-rollout generate`: the options of `generate_dataset`, from its own table of them."""

import argparse
import dataclasses
import sys
from typing import Any, get_args, get_type_hints

from cb_rollout.tools.cli.codes import EXIT_PARTLY
from cb_rollout.tools.dataset.options import DatasetOptions

DESCRIPTION = """\
Generate completions of every row of a data set. Results are appended as they end; run the same
command again to resume what was interrupted.

Input rows have `prompt` (text, messages, or token ids) or `messages`, perhaps an `id`, and any
other keys, which are carried over. Exit code 1: some sequences failed, and say why in `error`."""


def add_generate(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser(
        "generate",
        help="generate completions of a data set, resumably",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--model", required=True, help="A checkpoint's directory or hub name.")
    parser.add_argument(
        "--input",
        required=True,
        dest="dataset",
        help="A JSONL or Parquet file, or a `datasets` directory or hub name.",
    )
    parser.add_argument("--output", required=True, help="JSONL; resumed if it exists.")
    parser.add_argument(
        "--evaluate",
        metavar="MODULE:FUNCTION",
        help="Score each result: function(row) -> number, bool, or a dict of numbers.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Start over, whatever the output holds."
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="Generate again what the output holds as an error.",
    )
    parser.add_argument(
        "--no-progress-bar",
        dest="progress_bar",
        action="store_false",
        help="Write no progress to stderr.",
    )
    kinds = get_type_hints(DatasetOptions)
    for field in dataclasses.fields(DatasetOptions):
        _add_option(parser, field, kinds[field.name])
    parser.set_defaults(run=_run)


def _add_option(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    flag = f"--{field.name.replace('_', '-')}"
    help_text = field.metadata["help"].replace("%", "%%")
    if kind is bool:
        parser.add_argument(flag, action="store_true", help=help_text)
        return
    if field.default is not None:
        help_text += f" ({field.default})"
    given = next((k for k in get_args(kind) if k is not type(None)), kind)
    parser.add_argument(flag, type=given, help=help_text)


def _run(arguments: argparse.Namespace) -> int:
    # Importing torch and transformers takes seconds, which no other command should wait.
    from cb_rollout.tools.dataset import generate_dataset

    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    report = generate_dataset(**options)
    sys.stdout.write(f"{report}\n")
    return EXIT_PARTLY if report.num_failed else 0
