"""Pages of recorded sequences: every step's in files of their own, and a table with their links.

The report itself holds a few sequences; a browser loads the others page by page. Own which steps
have pages, and the bounds: of a page, and of all pages together.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

from cb_rollout.metrics.run_records import Run, SequenceRecord, iterate_rollouts, read_image
from cb_rollout.tools.report.layout import html_page, write_page
from cb_rollout.tools.report.summaries import RecordedStep, quantiles
from cb_rollout.tools.report.svg import compact
from cb_rollout.tools.report.tokens import legend_html, sequences_html, visible_html

PAGES_DIR = "report_pages"

# A page of so many completions, each cut as in the report, opens at once on a phone.
MAX_SEQUENCES_PER_PAGE = 16

# A step has its first 1,024 sequences on pages.
MAX_PAGES_PER_STEP = 64

# About 110 bytes of HTML a token: all pages together stay near 200 MB.
MAX_TOKENS_ON_PAGES = 2_000_000

# Rows of the table in the report.
MAX_STEPS_WITH_PAGES = 2_000


def steps_with_pages(steps: Mapping[int, RecordedStep]) -> list[int]:
    """Return the steps whose sequences get pages: all, or evenly spread ones within the bounds."""
    known = list(steps)
    num = min(len(known), MAX_STEPS_WITH_PAGES)
    while num > 1:
        chosen = [known[place * (len(known) - 1) // (num - 1)] for place in range(num)]
        if sum(steps[step].num_tokens for step in chosen) <= MAX_TOKENS_ON_PAGES:
            return chosen
        num = num * 9 // 10
    return known[-1:]


def write_pages(
    run_dir: Path, run: Run, steps: Mapping[int, RecordedStep], name: str
) -> list[Path]:
    """Write the pages of the chosen steps in place of those of an earlier report."""
    folder = run_dir / PAGES_DIR
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    chosen = set(steps_with_pages(steps))
    left = {step: _num_on_pages(steps[step]) for step in chosen}
    waiting: dict[int, list[SequenceRecord]] = {}
    written = []
    # A step's records are adjacent but for evaluations, so that few steps wait at a time.
    for record in iterate_rollouts(run_dir, run, chosen):
        if not left[record.step]:
            continue
        page = waiting.setdefault(record.step, [])
        page.append(record)
        left[record.step] -= 1
        if len(page) == MAX_SEQUENCES_PER_PAGE or not left[record.step]:
            num_done = _num_on_pages(steps[record.step]) - left[record.step]
            number = math.ceil(num_done / MAX_SEQUENCES_PER_PAGE)
            num_pages = _num_pages(steps[record.step])
            path = folder / page_file(record.step, number)
            write_page(path, _page(name, run_dir, page, number, num_pages))
            written.append(path)
            del waiting[record.step]
    return written


def page_file(step: int, number: int) -> str:
    """Return the name of a page; `number` counts a step's pages from 1."""
    return f"step_{step}_{number}.html"


def pages_table(steps: Mapping[int, RecordedStep]) -> str:
    """Return the table of the steps with pages, closed until it is asked for."""
    chosen = steps_with_pages(steps)
    rows = "".join(_row(step, steps[step]) for step in chosen)
    num = sum(_num_on_pages(steps[step]) for step in chosen)
    total = sum(found.num_sequences for found in steps.values())
    claim = f"All {num:,}" if num == total else f"{num:,} of {total:,}"
    return (
        f'<details class="pages"><summary>{claim} recorded sequences, by step</summary>'
        "<table><thead><tr><th>step</th><th>sequences</th><th>tokens</th><th>median reward</th>"
        f"<th>pages</th></tr></thead><tbody>{rows}</tbody></table></details>"
    )


def _row(step: int, found: RecordedStep) -> str:
    reward = compact(quantiles(found.rewards).middle) if found.rewards else "&ndash;"
    links = " ".join(
        f'<a href="{PAGES_DIR}/{page_file(step, number)}">{number}</a>'
        for number in range(1, _num_pages(found) + 1)
    )
    return (
        f"<tr><td>{step:,}</td><td>{found.num_sequences:,}</td><td>{found.num_tokens:,}</td>"
        f"<td>{reward}</td><td>{links}</td></tr>"
    )


def _num_on_pages(found: RecordedStep) -> int:
    return min(found.num_sequences, MAX_SEQUENCES_PER_PAGE * MAX_PAGES_PER_STEP)


def _num_pages(found: RecordedStep) -> int:
    return math.ceil(_num_on_pages(found) / MAX_SEQUENCES_PER_PAGE)


def _page(
    name: str, run_dir: Path, records: Sequence[SequenceRecord], number: int, num_pages: int
) -> str:
    step = records[0].step
    turns = [(number - 1, "previous page"), (number + 1, "next page")]
    links = "".join(
        f' &middot; <a href="{page_file(step, turn)}">{text}</a>'
        for turn, text in turns
        if 1 <= turn <= num_pages
    )
    place = escape(f"Step {step:,}, page {number:,} of {num_pages:,}")
    return html_page(
        name,
        f"""<header class="top">
<p class="kicker">{visible_html(name)} &middot; <a href="../report.html">report</a>{links}</p>
<h1>{place}</h1>
</header>
<section class="completions">{legend_html()}
{sequences_html(records, partial(read_image, run_dir))}</section>""",
    )
