"""Chooses the cases that CI runs on each change; the others are `nightly`.

The choice depends on a case's place in its list alone, so that it is the same in every process.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import pytest


def kept_by_day(num_cases: int) -> set[int]:
    """Return the numbers of the slow cases of a test that CI runs on each change.

    They are about the square root of all, at least two, and spread evenly from the first case to
    the last.
    """
    if num_cases <= 2:
        return set(range(num_cases))
    num_kept = max(2, math.isqrt(num_cases - 1) + 1)
    step = (num_cases - 1) / (num_kept - 1)
    return {round(i * step) for i in range(num_kept)}


def some_slow(cases: Iterable[Any], fast: Collection[Any] = (), every: int = 4) -> list:
    """Mark each case that is not fast: the first and then every so-manieth slow, the rest nightly.

    Args:
        cases: Values of one parameter.
        fast: The values that every run of the tests has, which get no mark.
        every: How many cases there are for each slow one.
    """
    params = []
    num_marked = 0
    for case in cases:
        if case in fast:
            params.append(pytest.param(case))
            continue
        mark = pytest.mark.nightly if num_marked % every else pytest.mark.slow
        params.append(pytest.param(case, marks=mark))
        num_marked += 1
    return params


def some_slow_pairs(
    rows: Sequence[Any],
    columns: Sequence[Any],
    fast: Collection[tuple[Any, Any]] = (),
    every: int = 4,
) -> Iterator[Any]:
    """Mark the pairs of two parameters: every row and every column has a slow one.

    Args:
        rows: Values of the first parameter, at least `every`.
        columns: Values of the second parameter, at least `every`.
        fast: The pairs that every run of the tests has, which get no mark.
        every: How many pairs there are for each slow one.
    """
    assert every <= min(len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            marks = [pytest.mark.nightly if (i + j) % every else pytest.mark.slow]
            if (row, column) in fast:
                marks = []
            yield pytest.param(row, column, marks=marks, id=f"{row}-{column}")


def slow_after(num_fast: int, cases: Iterable[Any]) -> list:
    """Mark all cases of a parametrized test but the first ones slow.

    Args:
        num_fast: How many cases every run of the tests has.
        cases: Values of one parameter, or tuples of the values of several.
    """
    params = []
    for number, case in enumerate(cases):
        marks = [] if number < num_fast else [pytest.mark.slow]
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=marks))
    return params
