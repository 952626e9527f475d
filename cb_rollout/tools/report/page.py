"""Report of a run: a self-contained HTML page from its records, and pages of its sequences.

This module owns the content and order of a page; parts without records are left out. A report shows
a few sequences, and links a page for each step. A comparison of two runs has their key figures, and
panels with a curve for each run. No page fetches anything. Loads no torch.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cb_rollout import __version__
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.metrics.run_records import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_DIR_NAME,
    Run,
    SequenceRecord,
    chosen_run,
    find_run_dir,
    iterate_rollouts,
    list_runs,
    read_image,
    read_last_audit,
    read_metrics,
)
from cb_rollout.metrics.run_settings import Sections, read_settings
from cb_rollout.metrics.write_faults import write_advice
from cb_rollout.tools.report import figures
from cb_rollout.tools.report.data import data_html, missing_curves
from cb_rollout.tools.report.figures import DRIFT_KEYS, STYLES, Metrics, series
from cb_rollout.tools.report.svg import Point, compact
from cb_rollout.tools.report.tokens import legend_html, sequences_html, visible_html

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
PAGES_DIR = "report_pages"
PAGE_FILE = "step_{}.html"

# The step of an evaluation that comes before the first step.
BEFORE_TRAINING = 0

# Maximum number of steps in the report itself.
MAX_STEPS = 3

# Maximum number of sequences of each of these steps: the usual size of a group.
MAX_SEQUENCES_PER_STEP = 8

# A page with this many completions, each cut as in the report, opens on a phone.
MAX_SEQUENCES_PER_PAGE = 64

# Rows of the table in the report. A page of four long completions takes 400 kB.
MAX_STEPS_WITH_PAGES = 500

# A browser may load only what is inside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dir: str | os.PathLike[str], run_id: str | None = None) -> Path:
    """Write `report.html` beside a run's records, and its sequences' pages in `report_pages/`.

    `run_dir` has the records, or is a trainer's output_dir with `cb_rollout/` in it. `run_id` names
    a run of the directory; None means the last one. Returns the page's path. `ConfigurationError`:
    there is no such run, a record cannot be read, or the page cannot be written.
    """
    with naming_file(run_dir):
        folder = find_run_dir(run_dir)
        runs = list_runs(folder)
        run = chosen_run(runs, run_id)
        name = run_name(folder)
        metrics = read_metrics(folder, run)
        counts = run.num_sequences
        shown = write_pages(folder, run, name) if counts else {}
        settings = read_settings(folder, run.run_id)
        charts = figures.figures_html({name: metrics})
        if charts:
            charts = f'<section class="charts">\n{charts}\n</section>'
        numbers = "".join(
            f'<div><dt>{label}</dt><dd>{value}</dd><dd class="note">{note}</dd></div>'
            for label, value, note in key_figures(metrics, counts)
        )
        page = html_page(
            name,
            f"""<header class="top">
<p class="kicker">Rollout report of run {visible_html(_title_of_run(run, runs))}</p>
<h1>{visible_html(name)}</h1>
<dl class="figures">{numbers}</dl>
</header>
{_advice(metrics, read_last_audit(folder), settings)}{charts}
{data_html({name: metrics}, {name: settings})}
{_completions(counts, shown, folder)}
<footer>cb_rollout {escape(__version__)}, from {len(metrics):,} records of {METRICS_FILE} and \
{sum(counts.values()):,} of {ROLLOUTS_FILE}.</footer>""",
        )
        write_whole(folder / REPORT_FILE, page.encode())
        return folder / REPORT_FILE


def _title_of_run(run: Run, runs: Sequence[Run]) -> str:
    """Return a run's name, its number in its directory, and the runs that it resumed."""
    title = run.run_id
    if len(runs) > 1:
        title += f", {runs.index(run) + 1} of {len(runs)} in this directory"
    for earlier_id, step in run.continues.items():
        title += f", after step {step:,} of {earlier_id}"
    return title


def _advice(metrics: Metrics, audit: str | None, settings: Sections) -> str:
    sentences = [*missing_curves(metrics, settings), *figures.advice(metrics)]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    if audit is not None:
        items += f'<li>The last audit:<pre class="prompt">{visible_html(audit)}</pre></li>'
    if not items:
        return ""
    return f'<section class="advice"><h2>Look at</h2><ul>{items}</ul></section>\n'


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return up to `most` of the ascending steps, evenly spread from the first to the last."""
    if len(steps) <= most:
        return list(steps)
    if most == 1:
        return [steps[0]]
    last = len(steps) - 1
    return [steps[place * last // (most - 1)] for place in range(most)]


def run_name(run_dir: Path) -> str:
    """Return the name of a run's output directory."""
    resolved = run_dir.resolve()
    return resolved.parent.name if resolved.name == RUN_DIR_NAME else resolved.name


def key_figures(metrics: Metrics, counts: dict[int, int]) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and note of each key figure."""
    trained_steps = {record.step for record in metrics if record.mode == "train"}
    steps = sorted(trained_steps or counts)
    if steps:
        yield "Steps", f"{len(steps):,}", f"from {steps[0]:,} to {steps[-1]:,}"
    reward = series(metrics, "reward")
    if reward:
        yield "Last reward", compact(reward[-1][1]), f"at step {reward[-1][0]:,}"
    if len(reward) > 1:
        trend = figures.smoothed(reward)
        first = compact(round(trend[0][1], 4))
        last = compact(round(trend[-1][1], 4))
        window = figures.smoothing_window(len(reward))
        note = f"mean over {window} steps" if window > 1 else "first and last step"
        yield "First to last reward", f"{first} <i>&rarr;</i> {last}", note
    speed = series(metrics, "rollout/tokens_per_second")
    seconds = series(metrics, "step_seconds")
    if seconds:
        middle = figures.without_overflow(median, [value for _, value in seconds])
        yield "Seconds per step", compact(middle), "median"
    if speed:
        middle = figures.without_overflow(median, [value for _, value in speed])
        yield "Tokens per second", compact(middle), "sampled while rolling out, median step"
    drift: list[Point] = []
    for key in DRIFT_KEYS:
        drift.extend(series(metrics, key))
    if drift:
        step, value = max(drift, key=lambda point: point[1])
        yield "Largest drift", compact(value), f"nats, at step {step:,}"


def _completions(
    counts: Mapping[int, int], rollouts: Mapping[int, Sequence[SequenceRecord]], run_dir: Path
) -> str:
    if not rollouts:
        return ""
    sections = ""
    for step, shown in rollouts.items():
        how_many = f"{len(shown):,} of {counts[step]:,} recorded sequences"
        sequences = sequences_html(shown, partial(read_image, run_dir))
        sections += f'<section class="step"><h3>Step {step:,}<span>{how_many}</span></h3>'
        sections += f"{sequences}</section>"
    num_trained = len(counts)
    source = f"{len(rollouts)} of {num_trained:,} recorded steps"
    if BEFORE_TRAINING in counts and num_trained > 1:
        num_trained -= 1
        num_shown = len(rollouts) - (BEFORE_TRAINING in rollouts)
        source = f"{num_shown} of {num_trained:,} recorded steps, and before the first"
    lead = (
        f"From {source}. A tint says how unlikely a token "
        "was when it was sampled; point at it for its log-probability, token id and policy version."
    )
    return (
        f'<section class="completions"><h2>Completions</h2><p class="lead">{lead}</p>'
        f"{pages_table(counts)}{legend_html()}{sections}</section>"
    )


def write_pages(run_dir: Path, run: Run, name: str) -> dict[int, list[SequenceRecord]]:
    """Write a page for each chosen step, replacing those of an earlier report.

    Returns the first sequences of each step that the report itself shows.
    """
    folder = run_dir / PAGES_DIR
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    counts = run.num_sequences
    chosen = spread(list(counts), MAX_STEPS_WITH_PAGES)
    waiting: dict[int, list[SequenceRecord]] = {step: [] for step in chosen}
    shown: dict[int, list[SequenceRecord]] = {step: [] for step in spread(chosen, MAX_STEPS)}
    # Only evaluations separate the records of a step, so few steps wait at a time.
    for record in iterate_rollouts(run_dir, run, waiting.keys()):
        step = record.step
        if step not in waiting:
            continue
        records = waiting[step]
        records.append(record)
        if len(records) < min(counts[step], MAX_SEQUENCES_PER_PAGE):
            continue
        page = html_page(
            name,
            f"""<header class="top">
<p class="kicker">{visible_html(name)} &middot; <a href="../{REPORT_FILE}">report</a></p>
<h1>Step {step:,}, {len(records):,} of {counts[step]:,} sequences</h1>
</header>
<section class="completions">{legend_html()}
{sequences_html(records, partial(read_image, run_dir))}</section>""",
        )
        write_whole(folder / PAGE_FILE.format(step), page.encode())
        if step in shown:
            shown[step] = records[:MAX_SEQUENCES_PER_STEP]
        del waiting[step]
    return shown


def pages_table(counts: Mapping[int, int]) -> str:
    """Return the table of the steps that have pages, collapsed until opened."""
    chosen = spread(list(counts), MAX_STEPS_WITH_PAGES)
    rows = "".join(
        f'<tr><td><a href="{PAGES_DIR}/{PAGE_FILE.format(step)}">{step:,}</a></td>'
        f"<td>{counts[step]:,}</td></tr>"
        for step in chosen
    )
    num = sum(min(counts[step], MAX_SEQUENCES_PER_PAGE) for step in chosen)
    total = sum(counts.values())
    claim = f"All {num:,}" if num == total else f"{num:,} of {total:,}"
    return (
        f'<details class="pages"><summary>{claim} recorded sequences, by step</summary>'
        f"<table><thead><tr><th>step</th><th>sequences</th></tr></thead><tbody>{rows}</tbody>"
        "</table></details>"
    )


@contextmanager
def naming_file(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` into a `ConfigurationError` that names the file that cannot be used."""
    try:
        yield
    except OSError as error:
        # If a page cannot be replaced, `filename2` is the page.
        path = error.filename2 or error.filename or run_dir
        raise ConfigurationError(
            f"{path} cannot be read or written ({error.strerror}). "
            f"{write_advice(error, path, 'run directory')}"
        ) from error


def html_page(name: str, content: str) -> str:
    """Return a self-contained page around its content."""
    style = files("cb_rollout.tools.report").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{visible_html(name)} &middot; rollout report</title>
<style>
{style}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""


def write_comparison(
    run_dir: str | os.PathLike[str],
    other: str | os.PathLike[str],
    run_ids: Sequence[str | None] = (None, None),
) -> Path:
    """Write `comparison.html` about two runs beside the records of the first.

    `run_ids` names a run of each directory (None: the last run); the directories may be the same.
    Raises `ConfigurationError` as `write_report` does, and for a run without metrics.
    """
    with naming_file(run_dir):
        first_id, second_id = run_ids
        first_folder = find_run_dir(run_dir)
        second_folder = find_run_dir(other)
        first_run = chosen_run(list_runs(first_folder), first_id)
        second_run = chosen_run(list_runs(second_folder), second_id)
        if first_folder.resolve() == second_folder.resolve() and first_run == second_run:
            raise ConfigurationError(f"{run_dir} and {other} are one run; name two.")
        first = _compared_run(first_folder, first_run)
        second = _compared_run(second_folder, second_run)
        if first.name == second.name:
            first = first._replace(name=f"{first_folder} {first_run.run_id}")
            second = second._replace(name=f"{second_folder} {second_run.run_id}")
        path = first_folder / COMPARISON_FILE
        write_whole(path, _comparison(first, second).encode())
        return path


class ComparedRun(NamedTuple):
    """One of the two runs in a comparison."""

    name: str
    """Name of the run's directory; its path and the run's id if both runs have the same name."""
    metrics: Metrics
    key_figures: Mapping[str, str]
    """Label and value."""
    settings: Sections


def _compared_run(folder: Path, run: Run) -> ComparedRun:
    """Read one of the compared runs, or raise `ConfigurationError` if it has no metrics."""
    metrics = read_metrics(folder, run)
    if not metrics:
        raise ConfigurationError(
            f"{folder} holds no metrics to compare; report after the run's first step."
        )
    values: dict[str, str] = {}
    for label, value, _ in key_figures(metrics, run.num_sequences):
        values[label] = value
    return ComparedRun(run_name(folder), metrics, values, read_settings(folder, run.run_id))


def _comparison(first: ComparedRun, second: ComparedRun) -> str:
    """Return the page about two runs."""
    rows = ""
    for label in {**first.key_figures, **second.key_figures}:
        rows += f"<tr><th>{label}</th>"
        for run in (first, second):
            rows += f"<td>{run.key_figures.get(label, '&ndash;')}</td>"
        rows += "</tr>"
    heads = "".join(
        f'<th><span class="key {style}"><i></i>{visible_html(run.name)}</span></th>'
        for style, run in zip(STYLES, (first, second), strict=True)
    )
    num_records = f"{len(first.metrics):,} and {len(second.metrics):,} records"
    sources = f"cb_rollout {__version__}, from {num_records}."
    metrics = {first.name: first.metrics, second.name: second.metrics}
    charts = figures.figures_html(metrics)
    data = data_html(metrics, {first.name: first.settings, second.name: second.settings})
    return html_page(
        f"{first.name} and {second.name}",
        f"""<header class="top">
<p class="kicker">Two runs</p>
<h1>{visible_html(first.name)} <i>and</i> {visible_html(second.name)}</h1>
<table class="runs"><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table>
</header>
<section class="charts">
{charts}
</section>
{data}
<footer>{escape(sources)}</footer>""",
    )
