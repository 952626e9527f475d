"""`cb-rollout bench`, writing the records that the documents are made from.

    python scripts/bench.py rollout            # into docs/benchmarks/, or --output-dir DIR
    python scripts/bench.py --help             # every workload and option

The workloads are in `cb_rollout/tools/bench/`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cb_rollout.tools import cli

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    # A tiny run is no record. argparse takes the last of an option that is given twice.
    folder = [] if "--tiny" in given else ["--output-dir", str(BENCHMARKS)]
    return cli.main(["bench", *folder, *given])


if __name__ == "__main__":
    sys.exit(main())
