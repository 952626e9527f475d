"""`cb-rollout report` and `watch`: write a report of one or two runs or a trace; serve a report."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.run_records import list_runs
from cb_rollout.tools.cli.command import Answer, add_json, whole_number
from cb_rollout.tools.report import write_comparison, write_report, write_trace
from cb_rollout.tools.report.live import LiveReport

RUN_DIR_HELP = "a trainer's output_dir, or the cb_rollout directory in it"


def add_report(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html about a run, from the records it left, beside them; or "
        "comparison.html about two, beside those of the first. With --trace, write only when the "
        "parts of the run's steps happened, for ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=RUN_DIR_HELP)
    text = "another to compare it with, or the same with two --run"
    parser.add_argument("other_run_dir", metavar="RUN_DIR", type=Path, nargs="?", help=text)
    text = "one of the runs of RUN_DIR (the last); once for each RUN_DIR, in their order"
    parser.add_argument("--run", metavar="ID", dest="run_ids", action="append", help=text)
    parser.add_argument("--list", action="store_true", help="list the runs of RUN_DIR")
    text = "write a trace (JSON) of one run instead"
    parser.add_argument("--trace", metavar="FILE", type=Path, help=text)
    add_json(parser)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> Answer:
    if arguments.list:
        runs = list_runs(arguments.run_dir)
        value = {"runs": [dataclasses.asdict(run) for run in runs]}
        return Answer("\n".join(map(str, runs)), value)
    run_dir = arguments.run_dir
    other_run_dir = arguments.other_run_dir
    run_ids: list[str] = arguments.run_ids or []
    num_dirs = 2
    if other_run_dir is None:
        num_dirs = 1
    if len(run_ids) > num_dirs:
        raise ConfigurationError(
            f"--run is given {len(run_ids)} times for {num_dirs} RUN_DIR; give one for each."
        )
    first_id = None
    second_id = None
    if run_ids:
        first_id = run_ids[0]
    if len(run_ids) > 1:
        second_id = run_ids[1]
    if arguments.trace is not None:
        if other_run_dir is not None:
            raise ConfigurationError("--trace is of one RUN_DIR; give one.")
        path = arguments.trace
        write_trace(run_dir, path, first_id)
    elif other_run_dir is None:
        path = write_report(run_dir, first_id)
    else:
        path = write_comparison(run_dir, other_run_dir, (first_id, second_id))
    return Answer(str(path), {"path": str(path)})


def add_watch(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "watch",
        help="show a run's report in a browser while it trains",
        description="Serve the report of RUN_DIR on this machine alone, written anew when its "
        "records change, until Ctrl-C. RUN_DIR may be empty yet.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help=RUN_DIR_HELP)
    parser.add_argument("--port", type=whole_number, default=8008, help="0: any free one (8008)")
    text = "between two loads of the page (10)"
    parser.add_argument("--seconds", type=whole_number, default=10, help=text)
    parser.set_run(_run_watch)


def _run_watch(arguments: argparse.Namespace) -> int:
    with LiveReport(arguments.run_dir, arguments.port, arguments.seconds) as server:
        print(f"{server.url} shows {arguments.run_dir}; Ctrl-C ends it.", flush=True)
        server.serve_forever()
    return 0
