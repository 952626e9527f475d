"""Comparison of two runs: a table of key figures, and a chart of two curves for each metric.

A panel that neither run has is left out; one of a single run is drawn with a single curve.
"""

import os
from collections.abc import Sequence
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
from cb_rollout.tools.report.figures import STYLES, figures_html
from cb_rollout.tools.report.page import html_page, key_figures, run_name, unusable
from cb_rollout.tools.report.tokens import visible_html

COMPARISON_FILE = "comparison.html"


def write_comparison(
    run_dir: str | os.PathLike[str],
    other: str | os.PathLike[str],
    run_ids: Sequence[str | None] = (None, None),
) -> Path:
    """Write `comparison.html` about two runs beside the records of the first.

    `run_ids` are a run of each directory, which may be the same; None: the last.

    Raises:
        ConfigurationError: a run has no metrics, a record cannot be read, or the page cannot
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
    sources = f"cb_rollout {__version__}, from {len(metrics[0]):,} and {len(metrics[1]):,} records."
    return html_page(
        " and ".join(names),
        f"""<header class="top">
<p class="kicker">Two runs</p>
<h1>{visible_html(names[0])} <i>and</i> {visible_html(names[1])}</h1>
<table class="runs"><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>
</header>
<section class="charts">
{figures_html(dict(zip(names, metrics, strict=True)))}
</section>
<footer>{escape(sources)}</footer>""",
    )
