"""Score completions with a user's function, and format a table of the mean scores.

Standard errors are those of the mean over rows, since a row's samples are not independent.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import stdev
from typing import Any, cast

from cb_rollout.errors import ConfigurationError, error_text

# Called with a result: the row's keys, the completion, and the sequence's number as "sample".
Scorer = Callable[[dict[str, Any]], float | bool | Mapping[str, float]]

# Name of a score that a function returns without a name.
UNNAMED_SCORE = "score"


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """A score over all rows."""

    name: str
    num_rows: int
    num_sequences: int
    mean: float
    """Mean over rows of the mean over a row's sequences; for a 0-or-1 score, this is pass@1."""
    mean_error: float
    """Standard error of `mean`; NaN for a single row."""
    best: float
    """Mean over rows of the best of a row's sequences; for a 0-or-1 score, this is pass@n."""
    best_error: float
    """Standard error of `best`; NaN for a single row."""


def load_scorer(name: str) -> Scorer:
    """Load `module:function`, from the working directory too, or raise `ConfigurationError`."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigurationError(f"evaluate={name!r} is not of the form module:function.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"evaluate={name!r}: {module_name} does not load ({error_text(error)}); run from its "
            "directory, or put that on PYTHONPATH."
        ) from error
    scorer: Any = getattr(module, function_name, None)
    if not callable(scorer):
        raise ConfigurationError(f"evaluate={name!r}: {module_name} has no such function.")
    return cast("Scorer", scorer)


def name_of(scorer: Scorer) -> str:
    """Return a function's name as `module:function`."""
    return f"{scorer.__module__}:{getattr(scorer, '__qualname__', type(scorer).__qualname__)}"


def scores_of(scorer: Scorer, result: Mapping[str, Any], label: str) -> dict[str, float]:
    """Return a result's scores by name; `ConfigurationError`: the function raised, or gave none."""
    where = f"{name_of(scorer)} on {label} (id {result['id']!r}, sample {result['sample']})"
    try:
        returned = scorer(dict(result))
    except Exception as error:
        advice = "mend it and run the same again with rescore=True: all results are scored again"
        raise ConfigurationError(f"{where} raised {error_text(error)}; {advice}.") from error
    named: dict[Any, Any] = {UNNAMED_SCORE: returned}
    if isinstance(returned, Mapping):
        named = dict(returned)
    scores: dict[str, float] = {}
    for name, value in named.items():
        with suppress(TypeError, ValueError):
            scores[str(name)] = float(value)
        if not math.isfinite(scores.get(str(name), math.nan)):
            raise ConfigurationError(f"{where} gave {name}={value!r}; return a finite number.")
    return scores


def summaries(results: Iterable[Mapping[str, Any]]) -> list[ScoreSummary]:
    """Summarise every score over the results that have it, in the order of first appearance."""
    by_name: dict[str, dict[Any, list[float]]] = {}
    for result in results:
        for name, value in result.get("scores", {}).items():
            by_name.setdefault(name, {}).setdefault(result["id"], []).append(value)
    return [_summary(name, list(rows.values())) for name, rows in by_name.items()]


def _summary(name: str, scores_of_rows: list[list[float]]) -> ScoreSummary:
    mean, mean_error = _mean_and_error([sum(scores) / len(scores) for scores in scores_of_rows])
    best, best_error = _mean_and_error([max(scores) for scores in scores_of_rows])
    return ScoreSummary(
        name=name,
        num_rows=len(scores_of_rows),
        num_sequences=sum(map(len, scores_of_rows)),
        mean=mean,
        mean_error=mean_error,
        best=best,
        best_error=best_error,
    )


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean, and its standard error; NaN for a single value."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, stdev(values, mean) / math.sqrt(len(values))


def table(scores: Iterable[ScoreSummary], num_return_sequences: int) -> str:
    """Format scores as lines of text; with the best of a row's sequences if it has several."""
    has_best = num_return_sequences > 1
    header = ["score", "rows", "sequences", "mean", "+-"]
    if has_best:
        header += [f"best of {num_return_sequences}", "+-"]
    rows = [header]
    for score in scores:
        row = [score.name, f"{score.num_rows:,}", f"{score.num_sequences:,}"]
        row += [f"{score.mean:.4f}", f"{score.mean_error:.4f}"]
        if has_best:
            row += [f"{score.best:.4f}", f"{score.best_error:.4f}"]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join(cells))
    return "\n".join(lines)
