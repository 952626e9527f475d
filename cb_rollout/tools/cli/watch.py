"""`cb-rollout watch`: serve a run's report on this machine while the run goes on."""

import argparse
from pathlib import Path
from typing import Any

from cb_rollout.tools.report.live import LiveReport


def add_watch(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "watch",
        help="show a run's report in a browser while it trains",
        description="Serve the report of RUN_DIR on this machine alone, written anew when its "
        "records change, until Ctrl-C. RUN_DIR may be empty yet.",
    )
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="a trainer's output_dir, or the cb_rollout directory in it",
    )
    parser.add_argument("--port", type=int, default=8008, help="0: any free one (8008)")
    parser.add_argument(
        "--seconds", type=int, default=10, help="between two loads of the page (10)"
    )
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    with LiveReport(arguments.run_dir, arguments.port, arguments.seconds) as server:
        print(f"{server.url} shows {arguments.run_dir}; Ctrl-C ends it.", flush=True)
        server.serve_forever()
    return 0
