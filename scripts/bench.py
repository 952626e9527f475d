"""Times cb_rollout beside its peers, in one process, and writes what it measured as JSON.

    python scripts/bench.py rollout            # one rollout: prompts in, completions out
    python scripts/bench.py step               # one GRPO step through TRL
    python scripts/bench.py sync               # a weight sync, beside bare tensor copies
    python scripts/bench.py strategies         # over-sampling and its like, against plain
    python scripts/bench.py serve              # the same requests over HTTP on this machine
    python scripts/bench.py scaling            # from one request at once to 1,024
    python scripts/bench.py profile            # where a rollout's time goes
    python scripts/bench.py bookkeeping        # what a decode step takes beside its forward
    python scripts/bench.py roofline           # what this machine can do at most

Contenders take turns, so that a slow spell of the machine meets all of them; figures are medians
over the repetitions, and only ratios within one run mean anything. The workloads are in
`cb_rollout/bench/`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from cb_rollout.bench.record import write_record
from cb_rollout.bench.sizes import CPU, GPU, TINY, Setup
from cb_rollout.bench.table import print_table

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"

WORKLOADS = (
    "rollout", "step", "sync", "strategies", "serve", "scaling", "profile", "bookkeeping",
    "roofline",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one workload, print its table and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--batch-size", type=int, help="of model.generate in rollout and scaling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output-dir", type=Path, help="default: docs/benchmarks")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tiny and options.output_dir is None:
        parser.error("--tiny says nothing of speed; give it an --output-dir of its own.")
    setup = Setup(
        device=options.device,
        repetitions=options.repetitions,
        sizes=TINY if options.tiny else CPU if options.device == "cpu" else GPU,
        batch_size=options.batch_size,
    )
    # A workload's own imports, trl's for one, are for it alone.
    results = importlib.import_module(f"cb_rollout.bench.{options.workload}").bench(setup)
    print_table(results)
    path = write_record(options.workload, setup, results, options.output_dir or BENCHMARKS)
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
