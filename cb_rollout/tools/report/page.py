"""Report of a run: a self-contained HTML page from its records, and pages of its sequences.

Own the content and order of the page; a part without records is left out. `charts` and `spreads`
draw, `pages` has the sequences that are not on it. No page fetches anything. Loads no torch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import median

from cb_rollout import __version__
from cb_rollout.metrics.run_records import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    RUN_DIR_NAME,
    Run,
    SequenceRecord,
    StepMetrics,
    chosen_run,
    find_run_dir,
    iterate_rollouts,
    list_runs,
    read_image,
    read_metrics,
)
from cb_rollout.tools.report.charts import (
    DRIFT_KEYS,
    drift_figure,
    lengths_figure,
    routes_figure,
    share_figure,
    throughput_figure,
)
from cb_rollout.tools.report.layout import html_page, unusable, write_page
from cb_rollout.tools.report.pages import pages_table, write_pages
from cb_rollout.tools.report.series import series, smoothed, smoothing_window
from cb_rollout.tools.report.spreads import (
    groups_figure,
    learning_figure,
    length_spread_figure,
    staleness_figure,
    surprise_figure,
    versions_figure,
)
from cb_rollout.tools.report.summaries import RecordedStep, recorded_steps
from cb_rollout.tools.report.svg import Point, compact
from cb_rollout.tools.report.tokens import legend_html, sequences_html, visible_html

REPORT_FILE = "report.html"

# The usual size of a group; three such steps load quickly on a phone.
MAX_SEQUENCES_PER_STEP = 8


def write_report(run_dir: str | os.PathLike[str], run_id: str | None = None) -> Path:
    """Write `report.html` beside a run's records, and its sequences' pages in `report_pages/`.

    Args:
        run_dir: the directory with the records, or a trainer's output_dir with `cb_rollout/` in it.
        run_id: a run of the directory; None: the last.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: there is no such run, a record cannot be read, or the page cannot be
            written.
    """
    try:
        return _write_report(find_run_dir(run_dir), run_id)
    except OSError as error:
        raise unusable(run_dir, error) from error


def _write_report(run_dir: Path, run_id: str | None) -> Path:
    runs = list_runs(run_dir)
    run = chosen_run(runs, run_id)
    metrics, counts = read_metrics(run_dir, run), run.num_sequences
    steps = recorded_steps(iterate_rollouts(run_dir, run))
    rollouts = _sequences_shown(run_dir, run)
    name = run_name(run_dir)
    page = html_page(
        name,
        f"""<header class="top">
<p class="kicker">Rollout report of run {visible_html(_described(run, runs))}</p>
<h1>{visible_html(name)}</h1>
{_key_figures(metrics, counts)}
</header>
{_charts(metrics, steps)}
{_completions(steps, rollouts, run_dir)}
<footer>{_sources(metrics, counts)}</footer>""",
    )
    if steps:
        write_pages(run_dir, run, steps, name)
    path = run_dir / REPORT_FILE
    write_page(path, page)
    return path


def _described(run: Run, runs: Sequence[Run]) -> str:
    place = f", {runs.index(run) + 1} of {len(runs)} in this directory" if len(runs) > 1 else ""
    resumed = "".join(f", after step {step:,} of {of}" for of, step in run.continues.items())
    return f"{run.run_id}{place}{resumed}"


def steps_shown(steps: Sequence[int]) -> list[int]:
    """Return the first, middle and last of ascending `steps`, each once."""
    return sorted({steps[0], steps[(len(steps) - 1) // 2], steps[-1]}) if steps else []


def run_name(run_dir: Path) -> str:
    """Return the name of a run's output directory."""
    resolved = run_dir.resolve()
    return resolved.parent.name if resolved.name == RUN_DIR_NAME else resolved.name


def _key_figures(metrics: Sequence[StepMetrics], counts: dict[int, int]) -> str:
    figures = "".join(
        f'<div><dt>{label}</dt><dd>{value}</dd><dd class="note">{note}</dd></div>'
        for label, value, note in key_figures(metrics, counts)
    )
    return f'<dl class="figures">{figures}</dl>'


def key_figures(
    metrics: Sequence[StepMetrics], counts: dict[int, int]
) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and note of each key figure."""
    steps = sorted({record.step for record in metrics if record.mode == "train"} or counts)
    if steps:
        yield "Steps", f"{len(steps):,}", f"from {steps[0]:,} to {steps[-1]:,}"
    reward = series(metrics, "reward")
    if reward:
        yield "Last reward", compact(reward[-1][1]), f"at step {reward[-1][0]:,}"
    if len(reward) > 1:
        trend = smoothed(reward)
        first, last = (compact(round(value, 4)) for _, value in (trend[0], trend[-1]))
        window = smoothing_window(len(reward))
        note = f"mean over {window} steps" if window > 1 else "first and last step"
        yield "First to last reward", f"{first} <i>&rarr;</i> {last}", note
    speed = series(metrics, "rollout/tokens_per_second")
    if speed:
        middle = median(value for _, value in speed)
        yield "Tokens per second", compact(middle), "sampled while rolling out, median step"
    drift = [point for key in DRIFT_KEYS for point in series(metrics, key)]
    if drift:
        yield "Largest drift", *_largest(drift)


def _largest(drift: Sequence[Point]) -> tuple[str, str]:
    step, value = max(drift, key=lambda point: point[1])
    return compact(value), f"nats, at step {step:,}"


def _charts(metrics: Sequence[StepMetrics], steps: Mapping[int, RecordedStep]) -> str:
    figures = [
        learning_figure(metrics),
        groups_figure(metrics),
        length_spread_figure(metrics),
        surprise_figure(metrics, steps),
        staleness_figure(metrics),
        versions_figure(steps),
        throughput_figure(metrics),
        share_figure(metrics),
        drift_figure(metrics),
        routes_figure(metrics),
        lengths_figure(metrics),
    ]
    drawn = "\n".join(filter(None, figures))
    return f'<section class="charts">\n{drawn}\n</section>' if drawn else ""


def _sequences_shown(run_dir: Path, run: Run) -> dict[int, list[SequenceRecord]]:
    """Return the first sequences of each shown step, holding no others."""
    shown: dict[int, list[SequenceRecord]] = {
        step: [] for step in steps_shown(list(run.num_sequences))
    }
    for record in iterate_rollouts(run_dir, run, shown):
        if len(shown[record.step]) < MAX_SEQUENCES_PER_STEP:
            shown[record.step].append(record)
    return shown


def _completions(
    steps: Mapping[int, RecordedStep],
    rollouts: Mapping[int, Sequence[SequenceRecord]],
    run_dir: Path,
) -> str:
    if not rollouts:
        return ""
    sections = []
    read = partial(read_image, run_dir)
    for step, shown in rollouts.items():
        sections.append(
            f'<section class="step"><h3>Step {step:,}<span>{len(shown):,} of '
            f"{steps[step].num_sequences:,} recorded sequences</span></h3>"
            f"{sequences_html(shown, read)}</section>"
        )
    lead = (
        f"From {len(sections)} of {len(steps):,} recorded steps. A tint says how unlikely a token "
        "was when it was sampled; point at it for its log-probability, token id and policy version."
    )
    return (
        f'<section class="completions"><h2>Completions</h2><p class="lead">{lead}</p>'
        f"{pages_table(steps)}{legend_html()}{''.join(sections)}</section>"
    )


def _sources(metrics: Sequence[StepMetrics], counts: dict[int, int]) -> str:
    return escape(
        f"cb_rollout {__version__}, from {len(metrics):,} records of {METRICS_FILE} and "
        f"{sum(counts.values()):,} of {ROLLOUTS_FILE}."
    )
