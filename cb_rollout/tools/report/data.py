"""The numbers of a report as a file to save, and the settings of its run, as HTML.

Every function is pure. A page holds the numbers itself, so that it can be sent alone.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from html import escape
from urllib.parse import quote

from cb_rollout.metrics.run_settings import Sections
from cb_rollout.tools.report.figures import Metrics, series
from cb_rollout.tools.report.tokens import visible_html

# A page with more numbers opens slowly, so longer runs leave out some steps.
MAX_CELLS = 60_000

# Metrics that a trainer logs only every `logging_steps`.
LOGGED = ("loss", "grad_norm")


def missing_curves(metrics: Metrics, settings: Sections) -> Iterator[str]:
    """Yield a sentence if the run is too short for the trainer to have logged its curves."""
    logging_steps = settings.get("Trainer", {}).get("logging_steps", "1")
    num_steps = len({record.step for record in metrics if record.mode == "train"})
    missing = [name for name in LOGGED if not series(metrics, name)]
    if num_steps and missing and logging_steps != "1":
        yield (
            f"{' and '.join(missing)} have no curve: the trainer logs them every "
            f"logging_steps={logging_steps} steps, and {num_steps:,} are recorded. Set "
            "logging_steps=1."
        )


def data_html(runs: Mapping[str, Metrics], settings: Mapping[str, Sections]) -> str:
    """Return the links to save the numbers of one or two runs, and the runs' settings."""
    links: list[str] = []
    for name, metrics in runs.items():
        if metrics:
            run_name = ""
            if len(runs) > 1:
                run_name = name
            links.append(_csv_link(metrics, run_name))
    parts = [f"<p>{link}</p>" for link in links]
    sections = list(settings.values())
    if len(sections) == 1 and sections[0]:
        parts.append(_settings_html(sections[0]))
    elif all(sections):
        parts.append(_differences_html(settings))
    if not parts:
        return ""
    return f'<section class="data"><h2>Data and settings</h2>{"".join(parts)}</section>'


def csv_text(metrics: Metrics) -> tuple[str, int, int]:
    """Return every recorded metric as CSV, one line per step and mode.

    Returns:
        The text; its number of lines below the header; the number of lines for all steps.
    """
    rows: dict[tuple[int, str], dict[str, float]] = {}
    for record in metrics:
        rows.setdefault((record.step, record.mode), {}).update(record.scalars)
    names: dict[str, None] = {}
    for scalars in rows.values():
        names.update(dict.fromkeys(scalars))
    stride = max(1, -(-len(rows) * len(names) // MAX_CELLS))
    chosen = sorted(rows)[::stride]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["step", "mode", *names])
    for step, mode in chosen:
        scalars = rows[step, mode]
        cells: list[object] = [step, mode]
        for name in names:
            value = scalars.get(name)
            if value is None:
                cells.append("")
            else:
                cells.append(f"{value:.7g}")
        writer.writerow(cells)
    return file.getvalue(), len(chosen), len(rows)


def _csv_link(metrics: Metrics, run_name: str) -> str:
    text, num_rows, num_all = csv_text(metrics)
    address = f"data:text/csv;charset=utf-8,{quote(text, safe=',.-')}"
    whose = ""
    if run_name:
        whose = f" of {visible_html(run_name)}"
    how_many = f"{num_rows:,} rows"
    if num_rows < num_all:
        how_many = f"{num_rows:,} of {num_all:,} rows; metrics.jsonl has all"
    link = f'<a download="metrics.csv" href="{address}">Save the metrics{whose} as CSV</a>'
    return f"{link} ({how_many})"


def _settings_html(sections: Sections) -> str:
    tables = ""
    for title, settings in sections.items():
        rows = "".join(
            f"<tr><th>{visible_html(name)}</th><td>{visible_html(str(value))}</td></tr>"
            for name, value in settings.items()
        )
        tables += f"<h3>{escape(title)}</h3><table><tbody>{rows}</tbody></table>"
    lead = "Settings that are not at their defaults, versions, machine"
    return f'<details class="settings"><summary>{lead}</summary>{tables}</details>'


def _differences_html(settings: Mapping[str, Sections]) -> str:
    """Return a table of the settings in which two runs differ."""
    (first_name, first), (second_name, second) = settings.items()
    rows = ""
    for title in {**first, **second}:
        ours = first.get(title, {})
        theirs = second.get(title, {})
        for name in {**ours, **theirs}:
            value = str(ours.get(name, "default"))
            other = str(theirs.get(name, "default"))
            if value != other:
                cells = f"<td>{visible_html(value)}</td><td>{visible_html(other)}</td>"
                rows += f"<tr><th>{visible_html(name)}</th>{cells}</tr>"
    if not rows:
        return "<p>The two runs have the same settings and versions.</p>"
    names = f"<td>{visible_html(first_name)}</td><td>{visible_html(second_name)}</td>"
    head = f"<thead><tr><th></th>{names}</tr></thead>"
    table = f"<table>{head}<tbody>{rows}</tbody></table>"
    lead = "<summary>Settings that differ</summary>"
    return f'<details class="settings" open>{lead}{table}</details>'
