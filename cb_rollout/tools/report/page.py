"""Report of a run: a self-contained HTML page from its records, and pages of its sequences.

Own the content and order of a page; a part without records is left out. A report holds a few
sequences, and links a page of each step. A comparison of two runs has their key figures, and panels
with a curve of either. No page fetches anything. Loads no torch.
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
from cb_rollout.tools.report import figures
from cb_rollout.tools.report.figures import DRIFT_KEYS, STYLES, Metrics, series
from cb_rollout.tools.report.svg import compact
from cb_rollout.tools.report.tokens import legend_html, sequences_html, visible_html

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
PAGES_DIR, PAGE_FILE = "report_pages", "step_{}.html"

# Steps in the report itself, and sequences of each, the usual size of a group.
MAX_STEPS, MAX_SEQUENCES_PER_STEP = 3, 8

# A page of so many completions, each cut as in the report, opens on a phone.
MAX_SEQUENCES_PER_PAGE = 64

# Rows of the table in the report. A page of four long completions takes 400 kB.
MAX_STEPS_WITH_PAGES = 500

# What a browser may load: what is inside the page alone.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dir: str | os.PathLike[str], run_id: str | None = None) -> Path:
    """Write `report.html` beside a run's records, and its sequences' pages in `report_pages/`.

    `run_dir` has the records, or is a trainer's output_dir with `cb_rollout/` in it. `run_id` is a
    run of the directory; None: the last. Returns the page's path. `ConfigurationError`: there is no
    such run, a record cannot be read, or the page cannot be written.
    """
    with naming_file(run_dir):
        folder = find_run_dir(run_dir)
        runs = list_runs(folder)
        run, name = chosen_run(runs, run_id), run_name(folder)
        metrics, counts = read_metrics(folder, run), run.num_sequences
        shown = write_pages(folder, run, name) if counts else {}
        charts = figures.figures_html({name: metrics})
        charts = f'<section class="charts">\n{charts}\n</section>' if charts else ""
        place = f", {runs.index(run) + 1} of {len(runs)} in this directory" if len(runs) > 1 else ""
        resumed = "".join(f", after step {step:,} of {of}" for of, step in run.continues.items())
        numbers = "".join(
            f'<div><dt>{label}</dt><dd>{value}</dd><dd class="note">{note}</dd></div>'
            for label, value, note in key_figures(metrics, counts)
        )
        page = html_page(
            name,
            f"""<header class="top">
<p class="kicker">Rollout report of run {visible_html(run.run_id + place + resumed)}</p>
<h1>{visible_html(name)}</h1>
<dl class="figures">{numbers}</dl>
</header>
{_advice(metrics, read_last_audit(folder))}{charts}
{_completions(counts, shown, folder)}
<footer>cb_rollout {escape(__version__)}, from {len(metrics):,} records of {METRICS_FILE} and \
{sum(counts.values()):,} of {ROLLOUTS_FILE}.</footer>""",
        )
        write_whole(folder / REPORT_FILE, page.encode())
        return folder / REPORT_FILE


def _advice(metrics: Metrics, audit: str | None) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in figures.advice(metrics))
    if audit is not None:
        items += f'<li>The last audit:<pre class="prompt">{visible_html(audit)}</pre></li>'
    return f'<section class="advice"><h2>Look at</h2><ul>{items}</ul></section>\n' if items else ""


def spread(steps: Sequence[int], most: int) -> list[int]:
    """Return `most` of ascending steps, evenly spread from the first to the last, or all."""
    num = min(len(steps), most)
    return [steps[place * (len(steps) - 1) // max(1, num - 1)] for place in range(num)]


def run_name(run_dir: Path) -> str:
    """Return the name of a run's output directory."""
    resolved = run_dir.resolve()
    return resolved.parent.name if resolved.name == RUN_DIR_NAME else resolved.name


def key_figures(metrics: Metrics, counts: dict[int, int]) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and note of each key figure."""
    steps = sorted({record.step for record in metrics if record.mode == "train"} or counts)
    if steps:
        yield "Steps", f"{len(steps):,}", f"from {steps[0]:,} to {steps[-1]:,}"
    reward = series(metrics, "reward")
    if reward:
        yield "Last reward", compact(reward[-1][1]), f"at step {reward[-1][0]:,}"
    if len(reward) > 1:
        trend = figures.smoothed(reward)
        first, last = (compact(round(value, 4)) for _, value in (trend[0], trend[-1]))
        window = figures.smoothing_window(len(reward))
        note = f"mean over {window} steps" if window > 1 else "first and last step"
        yield "First to last reward", f"{first} <i>&rarr;</i> {last}", note
    speed = series(metrics, "rollout/tokens_per_second")
    if speed:
        middle = median(value for _, value in speed)
        yield "Tokens per second", compact(middle), "sampled while rolling out, median step"
    drift = [point for key in DRIFT_KEYS for point in series(metrics, key)]
    if drift:
        step, value = max(drift, key=lambda point: point[1])
        yield "Largest drift", compact(value), f"nats, at step {step:,}"


def _completions(
    counts: Mapping[int, int], rollouts: Mapping[int, Sequence[SequenceRecord]], run_dir: Path
) -> str:
    if not rollouts:
        return ""
    sections = "".join(
        f'<section class="step"><h3>Step {step:,}<span>{len(shown):,} of '
        f"{counts[step]:,} recorded sequences</span></h3>"
        f"{sequences_html(shown, partial(read_image, run_dir))}</section>"
        for step, shown in rollouts.items()
    )
    lead = (
        f"From {len(rollouts)} of {len(counts):,} recorded steps. A tint says how unlikely a token "
        "was when it was sampled; point at it for its log-probability, token id and policy version."
    )
    return (
        f'<section class="completions"><h2>Completions</h2><p class="lead">{lead}</p>'
        f"{pages_table(counts)}{legend_html()}{sections}</section>"
    )


def write_pages(run_dir: Path, run: Run, name: str) -> dict[int, list[SequenceRecord]]:
    """Write a page of each chosen step in place of those of an earlier report.

    Returns the first sequences of each step that the report itself shows.
    """
    folder = run_dir / PAGES_DIR
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    counts = run.num_sequences
    chosen = spread(list(counts), MAX_STEPS_WITH_PAGES)
    waiting: dict[int, list[SequenceRecord]] = {step: [] for step in chosen}
    shown: dict[int, list[SequenceRecord]] = {step: [] for step in spread(chosen, MAX_STEPS)}
    # A step's records are adjacent but for evaluations, so that few steps wait at a time.
    for record in iterate_rollouts(run_dir, run, waiting.keys()):
        if (records := waiting.get(record.step)) is None:
            continue
        records.append(record)
        if len(records) == min(counts[record.step], MAX_SEQUENCES_PER_PAGE):
            page = html_page(
                name,
                f"""<header class="top">
<p class="kicker">{visible_html(name)} &middot; <a href="../{REPORT_FILE}">report</a></p>
<h1>Step {record.step:,}, {len(records):,} of {counts[record.step]:,} sequences</h1>
</header>
<section class="completions">{legend_html()}
{sequences_html(records, partial(read_image, run_dir))}</section>""",
            )
            write_whole(folder / PAGE_FILE.format(record.step), page.encode())
            if record.step in shown:
                shown[record.step] = records[:MAX_SEQUENCES_PER_STEP]
            del waiting[record.step]
    return shown


def pages_table(counts: Mapping[int, int]) -> str:
    """Return the table of the steps with pages, closed until it is asked for."""
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
    """Raise `ConfigurationError` for a file of a run, or of its page, that cannot be used."""
    try:
        yield
    except OSError as error:
        # A page that cannot be replaced is the second file.
        path = error.filename2 or error.filename or run_dir
        raise ConfigurationError(
            f"{path} cannot be read or written ({error.strerror}); look at what it is and who may "
            "use it."
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

    `run_ids` are a run of each directory, which may be the same; None: the last. Raises
    `ConfigurationError` as `write_report`, and for a run without metrics.
    """
    with naming_file(run_dir):
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
        write_whole(path, _comparison(_names(folders, runs), runs, metrics).encode())
        return path


def _names(folders: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    """Return names that differ: of the directories, else with their paths and runs."""
    names = [run_name(folder) for folder in folders]
    if names[0] == names[1]:
        return [f"{folder} {run.run_id}" for folder, run in zip(folders, runs, strict=True)]
    return names


def _comparison(names: Sequence[str], runs: Sequence[Run], metrics: Sequence[Metrics]) -> str:
    # Label and value of each key figure, without its note.
    values = [
        {label: value for label, value, _ in key_figures(found, run.num_sequences)}
        for found, run in zip(metrics, runs, strict=True)
    ]
    rows = "".join(
        f"<tr><th>{label}</th>"
        + "".join(f"<td>{values[side].get(label, '&ndash;')}</td>" for side in (0, 1))
        + "</tr>"
        for label in values[0] | values[1]
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
{figures.figures_html(dict(zip(names, metrics, strict=True)))}
</section>
<footer>{escape(sources)}</footer>""",
    )
