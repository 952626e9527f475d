"""`cb-rollout generate`: `generate_dataset` as a command, with an option for each setting."""

import argparse
import dataclasses
from typing import Any

from cb_rollout.tools.cli.command import EXIT_PARTLY, Answer, add_fields, add_json
from cb_rollout.tools.dataset.options import DatasetOptions

DESCRIPTION = """\
Generate completions of every row of a data set. Results are appended as they end; run the same
command again to resume what was interrupted.

Input rows have `prompt` (text, messages, or token ids) or `messages`, perhaps an `id`, and any
other keys, which are carried over. A picture is a path, relative to the input: in messages
{"type": "image", "image": PATH}, beside a prompt `images`, a list. Exit code 1: some sequences
failed, and say why in `error`."""


def add_generate(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "generate",
        help="generate completions of a data set, resumably",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--model", required=True, help="A checkpoint's directory or hub name.")
    text = "A JSONL or Parquet file, or a `datasets` directory or hub name."
    parser.add_argument("--input", required=True, dest="dataset", help=text)
    text = "JSONL, in a directory that exists; resumed if it exists itself."
    parser.add_argument("--output", required=True, help=text)
    text = "Score each result: function(row) -> number, bool, or a dict of numbers."
    parser.add_argument("--evaluate", metavar="MODULE:FUNCTION", help=text)
    text = "Start over, whatever the output holds."
    parser.add_argument("--overwrite", action="store_true", help=text)
    text = "Score what the output holds again, by the function as it is now."
    parser.add_argument("--rescore", action="store_true", help=text)
    text = "Write no progress to stderr."
    parser.add_argument("--no-progress-bar", dest="progress_bar", action="store_false", help=text)
    add_json(parser)
    add_fields(parser, DatasetOptions)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> Answer:
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.dataset import generate_dataset

    options = dict(vars(arguments))
    del options["run"]
    del options["is_json"]
    report = generate_dataset(**options)
    exit_code = EXIT_PARTLY if report.num_failed else 0
    return Answer(str(report), dataclasses.asdict(report), exit_code)
