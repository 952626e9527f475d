"""Print the coverage of each folder of the package, and the files that tests reach least.

    bash scripts/test.sh --cov --cov-report=json:build/coverage.json
    python scripts/measure/coverage_by_room.py build/coverage.json

The first line measures lines and branches; more arguments choose the tests, as always. What runs in
child processes is not seen. `--least N` fails where the whole is below N percent.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "cb_rollout"
NUM_FILES_SHOWN = 20

# A file of fewer lines and branches says little by its percentage.
LEAST_PARTS_SHOWN = 20


class Coverage(NamedTuple):
    """Lines and branches, and how many of them the tests reached."""

    num_lines: int
    num_lines_reached: int
    num_branches: int
    num_branches_reached: int

    @property
    def num_parts(self) -> int:
        """Lines and branches together."""
        return self.num_lines + self.num_branches

    @property
    def percent(self) -> float:
        """The percentage that coverage.py gives; 100 where there is nothing to reach."""
        if not self.num_parts:
            return 100.0
        return 100 * (self.num_lines_reached + self.num_branches_reached) / self.num_parts


def total(coverages: Iterable[Coverage]) -> Coverage:
    """Return the sum of several files' numbers."""
    return Coverage(*(sum(numbers) for numbers in zip(*coverages, strict=True)))


def read(report: dict[str, Any]) -> dict[str, Coverage]:
    """Return the coverage of each file of a JSON report of coverage.py."""
    files: dict[str, Coverage] = {}
    for path, file in report["files"].items():
        summary = file["summary"]
        files[path] = Coverage(
            num_lines=summary["num_statements"],
            num_lines_reached=summary["covered_lines"],
            num_branches=summary["num_branches"],
            num_branches_reached=summary["covered_branches"],
        )
    return files


def room(path: str) -> str:
    """Return the folder that a file counts for: at most two levels below the package."""
    parts = Path(path).parent.parts
    return "/".join(parts[:3])


def table(files: dict[str, Coverage]) -> list[str]:
    """Return the lines of a Markdown table: a row for each folder, then the whole."""
    rooms: dict[str, list[Coverage]] = defaultdict(list)
    for path, coverage in files.items():
        rooms[room(path)].append(coverage)
    rows = ["| folder | lines | branches | reached |", "|---|---:|---:|---:|"]
    for name in sorted(rooms):
        rows.append(_row(f"`{name}`", total(rooms[name])))
    rows.append(_row("**all**", total(files.values())))
    return rows


def _row(name: str, coverage: Coverage) -> str:
    return (
        f"| {name} | {coverage.num_lines:,} | {coverage.num_branches:,} | {coverage.percent:.1f}% |"
    )


def least_reached(files: dict[str, Coverage]) -> list[str]:
    """Return a line for each of the files of which the smallest share is reached."""
    shown = [path for path in files if files[path].num_parts >= LEAST_PARTS_SHOWN]
    shown.sort(key=lambda path: files[path].percent)
    return [f"- {files[path].percent:.0f}% of `{path}`" for path in shown[:NUM_FILES_SHOWN]]


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of a report."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("report", type=Path, help="the JSON file that coverage.py wrote")
    parser.add_argument("--least", type=float, default=0.0, help="percentage below which it fails")
    options = parser.parse_args(arguments)
    files = read(json.loads(options.report.read_text()))
    if not any(path.startswith(PACKAGE) for path in files):
        print(f"error: {options.report} has no file of {PACKAGE}", file=sys.stderr)
        return 2
    print("\n".join(table(files)))
    print("\nReached least:\n")
    print("\n".join(least_reached(files)))
    percent = total(files.values()).percent
    if percent < options.least:
        print(f"error: {percent:.1f}% is below {options.least}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
