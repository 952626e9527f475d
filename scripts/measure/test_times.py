"""Print the processor seconds of each test file and of the longest tests, child processes included.

`python scripts/measure/test_times.py` runs the fast tests in one process. Arguments go to pytest:
`python scripts/measure/test_times.py -m slow tests/invariants`. `--json FILE` keeps the figures.

Processor seconds are the same on a busy machine as on an idle one, up to its caches; seconds on a
clock are not. Imports of test files are counted apart.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
NUM_TESTS_SHOWN = 40


def children_of(pid: int) -> list[int]:
    """Return the ids of a process's children, of every thread of it."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except OSError:
            continue
    return children


def seconds_of_descendants(pid: int) -> float:
    """Return the processor seconds of a process's descendants, ended ones included."""
    seconds = 0.0
    for child in children_of(pid):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # utime, stime, cutime and cstime: fields 14 to 17 of proc(5). The third follows ")".
        seconds += sum(map(int, fields[11:15])) / TICKS_PER_SECOND
        seconds += seconds_of_descendants(child)
    return seconds


def seconds_used() -> float:
    """Return the processor seconds of this process and of all its descendants."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + seconds_of_descendants(os.getpid())


class Meter:
    """A pytest plugin that adds up processor seconds by file and by test."""

    def __init__(self) -> None:
        self.collection: Counter[str] = Counter()
        self.tests: dict[str, dict[str, float]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        """Measure the import of a test file."""
        before = seconds_used()
        yield
        if isinstance(collector, pytest.Module):
            self.collection[collector.nodeid] += seconds_used() - before

    def _measured(self, item: pytest.Item, phase: str) -> Iterator[None]:
        before = seconds_used()
        yield
        phases = self.tests.setdefault(item.nodeid, {})
        phases[phase] = max(0.0, seconds_used() - before)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Measure the fixtures that a test is the first to ask for."""
        yield from self._measured(item, "setup")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure a test."""
        yield from self._measured(item, "call")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Measure what ends after a test."""
        yield from self._measured(item, "teardown")

    def by_file(self) -> Counter[str]:
        """Return the seconds of each file's tests, without its import."""
        files: Counter[str] = Counter()
        for test, phases in self.tests.items():
            files[test.partition("::")[0]] += sum(phases.values())
        return files


def print_tables(meter: Meter) -> None:
    """Print the files, then the longest tests."""
    files = meter.by_file()
    num_tests = Counter(test.partition("::")[0] for test in meter.tests)
    imports = sum(meter.collection.values())
    print(f"\n{imports:8.1f} s  import of {len(meter.collection)} files")
    print(f"{files.total():8.1f} s  {len(meter.tests)} tests\n")
    for file, seconds in files.most_common():
        print(f"{seconds:8.1f} s  {num_tests[file]:4} tests  {file}")
    print("\nthe longest tests, with set-up and call")
    longest = sorted(meter.tests.items(), key=lambda test: -sum(test[1].values()))
    for test, phases in longest[:NUM_TESTS_SHOWN]:
        setup, call = phases.get("setup", 0.0), phases.get("call", 0.0)
        print(f"{setup:8.1f} {call:8.1f}  {test}")


def main() -> int:
    """Run the tests and print where their seconds went."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", type=Path, help="a file for the seconds of each test's phases")
    options, arguments = parser.parse_known_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["WANDB_MODE"] = "offline"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    meter = Meter()
    code = pytest.main(["-q", "-n", "0", *arguments], plugins=[meter])
    print_tables(meter)
    if options.json:
        figures = {"collection": meter.collection, "tests": meter.tests}
        options.json.write_text(json.dumps(figures, indent=1))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
