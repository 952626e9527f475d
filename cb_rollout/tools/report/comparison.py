"""Comparison of two runs: a table of key figures, and a chart of two curves for each metric.

A metric that neither run has is left out; one that a single run has is drawn with one curve.
"""

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from cb_rollout import __version__
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.metrics.run_records import (
    Run,
    StepMetrics,
    chosen_run,
    find_run_dir,
    list_runs,
    read_metrics,
)
from cb_rollout.tools.report.figures import (
    DRIFT_FLOOR,
    DRIFT_KEYS,
    ROUTES,
    SHARE,
    THROUGHPUT,
    Span,
    figure,
    length_spread,
    quantile_spans,
    reward_spans,
    step_axis,
    tips_at,
)
from cb_rollout.tools.report.layout import html_page, unusable
from cb_rollout.tools.report.page import key_figures, run_name
from cb_rollout.tools.report.series import series, smoothed
from cb_rollout.tools.report.svg import (
    Band,
    Curve,
    compact,
    curve_chart,
    linear_axis,
    log_axis,
    percent,
    scientific,
)
from cb_rollout.tools.report.tokens import visible_html

COMPARISON_FILE = "comparison.html"

STYLES = ("a", "b")

# Scalar, title, note, and format of a value.
OVERLAYS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("reward", "Reward", "mean of each step, smoothed; band: one standard deviation", compact),
    ("eval_reward", "Evaluation reward", "mean of each evaluation", compact),
    ("rollout/tokens_per_second", *THROUGHPUT[:2], compact),
    ("rollout/step_share", *SHARE[:2], percent),
    (
        "completions/mean_length",
        "Completion length",
        "mean of each step, tokens; band: 10th to 90th percentile",
        compact,
    ),
    ("entropy", "Entropy", "in the loss, nats a token", compact),
    (
        "frac_reward_zero_std",
        "Groups without a difference",
        "share of groups whose rewards are all equal",
        percent,
    ),
    ("rollout/staleness_mean", "Staleness", "mean of each step's tokens, versions", compact),
    ("rollout/router_disagreement", *ROUTES[:2], percent),
    *((key, "Log-probability drift", f"{key}, nats", scientific) for key in DRIFT_KEYS),
)


def write_comparison(
    run_dir: str | os.PathLike[str],
    other: str | os.PathLike[str],
    run_ids: Sequence[str | None] = (None, None),
) -> Path:
    """Write `comparison.html` about two runs beside the records of the first.

    Args:
        run_dir: the directory of the first run.
        other: the directory of the second; may be the same.
        run_ids: a run of each directory; None: the last.

    Raises:
        ConfigurationError: one of them has no metrics, a record cannot be read, or the page cannot
            be written.
    """
    try:
        folders = [find_run_dir(run_dir), find_run_dir(other)]
        runs = [chosen_run(list_runs(f), i) for f, i in zip(folders, run_ids, strict=True)]
        if folders[0].resolve() == folders[1].resolve() and runs[0] == runs[1]:
            raise ConfigurationError(f"{run_dir} and {other} are one run; name two.")
        metrics = [read_metrics(f, run) for f, run in zip(folders, runs, strict=True)]
        for folder, found in zip(folders, metrics, strict=True):
            if not found:
                raise ConfigurationError(
                    f"{folder} holds no metrics to compare; report after the run's first step."
                )
        path = folders[0] / COMPARISON_FILE
        write_whole(path, _page(_names(folders, runs), runs, metrics).encode())
        return path
    except OSError as error:
        raise unusable(run_dir, error) from error


def _names(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    """Return names that differ: of the directories, with their path or their run if need be."""
    names = [run_name(folder) for folder in folders]
    if names[0] != names[1]:
        return names
    if folders[0].resolve() != folders[1].resolve():
        return [str(folder) for folder in folders]
    return [f"{names[0]} {run.run_id}" for run in runs]


def _page(
    names: Sequence[str], runs: Sequence[Run], metrics: Sequence[Sequence[StepMetrics]]
) -> str:
    # Label and value of each key figure, without its note.
    figures = [
        {label: value for label, value, _ in key_figures(found, run.num_sequences)}
        for found, run in zip(metrics, runs, strict=True)
    ]
    rows = "".join(
        f"<tr><th>{label}</th>"
        + "".join(f"<td>{figures[side].get(label, '&ndash;')}</td>" for side in (0, 1))
        + "</tr>"
        for label in figures[0] | figures[1]
    )
    heads = "".join(
        f'<th><span class="key {style}"><i></i>{visible_html(name)}</span></th>'
        for style, name in zip(STYLES, names, strict=True)
    )
    charts = "\n".join(filter(None, (_overlay(names, metrics, *overlay) for overlay in OVERLAYS)))
    sources = f"cb_rollout {__version__}, from {len(metrics[0]):,} and {len(metrics[1]):,} records."
    return html_page(
        " and ".join(names),
        f"""<header class="top">
<p class="kicker">Two runs</p>
<h1>{visible_html(names[0])} <i>and</i> {visible_html(names[1])}</h1>
<table class="runs"><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>
</header>
<section class="charts">
{charts}
</section>
<footer>{escape(sources)}</footer>""",
    )


def _overlay(
    names: Sequence[str],
    runs: Sequence[Sequence[StepMetrics]],
    key: str,
    title: str,
    note: str,
    label: Callable[[float], str],
) -> str:
    mode = "eval" if key.startswith("eval_") else "train"
    found = [
        (style, name, points)
        for style, name, metrics in zip(STYLES, names, runs, strict=True)
        if (points := series(metrics, key, mode))
    ]
    if not found:
        return ""
    if key == "reward":
        found = [(style, name, smoothed(points)) for style, name, points in found]
    points = [point for *_, drawn in found for point in drawn]
    bands = [
        Band(spans, style)
        for style, run in zip(STYLES, runs, strict=True)
        if (spans := _spans(run, key))
    ]
    values = [value for _, value in points]
    values += [value for band in bands for _, low, high in band.spans for value in (low, high)]
    is_drift = key in DRIFT_KEYS
    chart = curve_chart(
        [Curve(drawn, style) for style, _, drawn in found],
        x=step_axis(points),
        y=log_axis(values, floor=DRIFT_FLOOR) if is_drift else linear_axis(values),
        title=f"{title} of {len(found)} runs",
        tips=tips_at(found[0][2], label),
        bands=bands,
    )
    return figure(title, note, chart, [(style, name) for style, name, _ in found])


def _spans(metrics: Sequence[StepMetrics], key: str) -> list[Span]:
    """Return the spread that belongs to a scalar; empty where it has none."""
    if key == "reward":
        return reward_spans(metrics)
    return quantile_spans(length_spread(metrics)) if key == "completions/mean_length" else []
