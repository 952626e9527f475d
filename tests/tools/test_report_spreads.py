"""Figures with a spread, and pages of sequences: each number shown equals the records' own."""

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from report_page import FORBIDDEN, Page, a_sequence

from cb_rollout.metrics.run_records import RunRecorder, StepMetrics, read_metrics
from cb_rollout.tools.report import write_comparison, write_report
from cb_rollout.tools.report.figures import group_share, length_spread, reward_spread
from cb_rollout.tools.report.page import (
    MAX_SEQUENCES_PER_PAGE,
    MAX_STEPS_WITH_PAGES,
    PAGES_DIR,
    spread,
)
from cb_rollout.tools.report.svg import compact, percent

RNG = np.random.default_rng(0)
LENGTHS = {step: RNG.integers(1, 400, 64).tolist() for step in range(1, 6)}
LOGPROBS = {step: [RNG.uniform(-3, 0, 20).round(6).tolist() for _ in range(8)] for step in LENGTHS}
GROUPS = {
    step: [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [0.5, 0.5]][: step + 1] for step in range(1, 6)
}


def recorded(folder, shift=0.0):
    """A run of five steps, with all that the figures draw."""
    recorder = RunRecorder(folder)
    for step, lengths in LENGTHS.items():
        scalars = {
            "reward": step / 10 + shift,
            "reward_std": step / 100,
            "entropy": 2.0 - step / 10,
            "completions/mean_length": float(np.mean(lengths)),
            "rollout/staleness_mean": step / 4,
            "rollout/staleness_max": float(step),
            "rollout/router_disagreement": step / 500,
        }
        recorder.record_metrics(StepMetrics(step, "train", scalars, lengths, GROUPS[step]))
        for number, logprobs in enumerate(LOGPROBS[step]):
            recorder.record_sequence(
                a_sequence(
                    step,
                    tokens=["x"] * 20,
                    logprobs=logprobs,
                    request_id=f"{step}-{number}",
                    policy_versions=[(step, 12), (step + 1, 8)],
                    mask=[1] * 16 + [0] * 4,
                )
            )
    return folder


def tips_of(html, title):
    """Texts that one figure shows at its steps."""
    figure = next(part for part in html.split("<figure")[1:] if f"<h2>{title}</h2>" in part)
    return re.findall(r"<text x=\"50%\" y=\"2\">([^<]*)</text>", figure)


def test_each_figure_tells_the_numbers_of_the_records(tmp_path):
    html = write_report(recorded(tmp_path)).read_text()
    Page(html)
    tips = {
        "Reward": lambda step: (
            f"{compact(step / 10)} ({compact(step * 0.09)} to {compact(step * 0.11)})"
        ),
        "Length of completions": lambda step: of_quantiles(LENGTHS[step]),
        "Entropy": lambda step: compact(2.0 - step / 10),
        "Staleness": lambda step: compact(step / 4),
        "Routes": lambda step: percent(step / 500),
        "Groups": lambda step: {1: "50%", 2: "33.3%"}.get(step, "25%"),
    }
    for title, expected in tips.items():
        told = [tip.partition(";")[0] for tip in tips_of(html, title)]
        assert told == [f"step {step}: {expected(step)}" for step in LENGTHS], title
    seconds = [tip.partition("; ")[2] for tip in tips_of(html, "Staleness")]
    assert seconds == [f"largest {step}" for step in LENGTHS]


def of_quantiles(values):
    low, high = np.quantile(values, [0.1, 0.9])
    return f"{compact(np.mean(values))} ({compact(low)} to {compact(high)})"


def test_a_band_lies_where_its_numbers_are(tmp_path):
    recorder = RunRecorder(tmp_path)
    for step, std in ((1, 0.5), (2, 0.25)):
        scalars = {"reward": 0.5, "reward_std": std}
        recorder.record_metrics(StepMetrics(step, "train", scalars, []))
    (band,) = re.findall(r'class="band a" d="M([^"]*)Z"', write_report(tmp_path).read_text())
    # In thousandths, right and down: the upper edge, then the lower one back.
    corners = [tuple(map(float, corner.split())) for corner in band.split("L")]
    assert corners == [(0, 0), (1000, 250), (1000, 750), (0, 1000)]


@pytest.mark.parametrize("rewards", [[[0.0, 1.0], [1.0, 1.0]], [[-2.0, 0.5]], [[0.5]]])
def test_the_band_of_rewards_reaches_no_further_than_the_rewards(rewards):
    values = [reward for group in rewards for reward in group]
    mean, deviation = float(np.mean(values)), 5.0
    scalars = {"reward": mean, "reward_std": deviation}
    ((_, low, high),) = reward_spread([StepMetrics(1, "train", scalars, [], rewards)])
    assert (low, high) == (min(values), max(values))


@pytest.mark.parametrize("num", [1, 2, 7, 64])
def test_quantiles_are_those_of_numpy(num):
    values = RNG.integers(1, 400, num).tolist()
    ((_, *span),) = length_spread([StepMetrics(1, "train", {}, values)])
    assert span == pytest.approx(np.quantile(values, [0.1, 0.9]).tolist())


def test_a_later_line_of_a_step_without_lengths_keeps_its_band():
    # A trainer's last log is of the whole training, and has the number of its last step.
    step, last = StepMetrics(3, "train", {}, [4, 6]), StepMetrics(3, "train", {"runtime": 1.0}, [])
    assert length_spread([step, last]) == length_spread([step])
    assert len(length_spread([step])) == 1
    assert length_spread([last]) == []


def test_a_group_of_equal_rewards_is_solved_only_at_the_highest():
    for group, solved, differs in (([1.0, 1.0], 1, 0), ([0.5, 0.5], 0, 0), ([0.5, 1.0], 0, 1)):
        best = StepMetrics(1, "train", {}, [], [[1.0, 1.0]])
        metrics = [best, StepMetrics(2, "train", {}, [], [group])]
        assert group_share(metrics, solved=True)[1] == (2, solved)
        assert group_share(metrics, solved=False)[1] == (2, differs)


def test_rewards_that_are_not_there_are_read_back_and_left_out(tmp_path):
    groups = [[1.0, float("nan")], [1.0, 1.0]]
    RunRecorder(tmp_path).record_metrics(StepMetrics(1, "train", {}, [], groups))
    assert tips_of(write_report(tmp_path).read_text(), "Groups") == ["step 1: 0%; solved 100%"]
    (metrics,) = read_metrics(tmp_path)
    assert group_share([metrics], solved=True) == [(1, 1.0)]


def test_every_recorded_sequence_is_on_a_page_that_the_report_links(tmp_path):
    recorder = RunRecorder(tmp_path)
    picture = recorder.record_image(b"\x89PNG of a chart")
    names = [f"{step}-{number}" for step in (1, 2) for number in range(MAX_SEQUENCES_PER_PAGE)]
    for name in sorted(names, key=lambda name: int(name.split("-")[1])):
        step = int(name[0])
        recorder.record_sequence(a_sequence(step, request_id=name, images=[picture]))
    html = write_report(tmp_path).read_text()
    links = re.findall(r'href="([^"]*)"', html)
    assert len(links) == 2
    texts = [(tmp_path / link).read_text() for link in links]
    found = []
    for text in texts:
        page = Page(text)
        assert not (FORBIDDEN - {"img"}) & set(page.tags)
        assert page.tags.count("img") == 1
        found += re.findall(r'<span class="id">([^<]*)</span>', text)
        for link in re.findall(r'href="([^"]*)"', text):
            assert (tmp_path / PAGES_DIR / link).resolve().is_file()
    assert sorted(found) == sorted(names)
    assert f"All {len(names)} recorded sequences" in Page(html).text


def test_an_earlier_reports_pages_are_gone(tmp_path):
    RunRecorder(tmp_path).record_sequence(a_sequence(1))
    write_report(tmp_path)
    RunRecorder(tmp_path).record_sequence(a_sequence(2))
    write_report(tmp_path)
    assert [path.name for path in (tmp_path / PAGES_DIR).iterdir()] == ["step_2.html"]


def test_pages_are_bounded_and_their_steps_evenly_spread():
    for num in (0, 1, 2, MAX_STEPS_WITH_PAGES):
        assert spread(range(num), MAX_STEPS_WITH_PAGES) == list(range(num))
    steps = spread(range(10**5), MAX_STEPS_WITH_PAGES)
    assert len(steps) == MAX_STEPS_WITH_PAGES
    assert (steps[0], steps[-1]) == (0, 10**5 - 1)
    gaps = np.diff(steps)
    assert gaps.max() - gaps.min() <= 1


def test_a_step_of_very_many_sequences_has_the_first_of_them_on_its_page(tmp_path):
    recorder = RunRecorder(tmp_path)
    num = MAX_SEQUENCES_PER_PAGE
    for _ in range(num + 5):
        recorder.record_sequence(a_sequence(3))
    html = write_report(tmp_path).read_text()
    (page,) = (tmp_path / PAGES_DIR).iterdir()
    assert f"Step 3, {num} of {num + 5} sequences" in Page(page.read_text()).text
    assert f"{num:,} of {num + 5:,} recorded sequences" in Page(html).text


def test_two_runs_have_bands_of_their_own(tmp_path):
    folders = recorded(tmp_path / "first"), recorded(tmp_path / "second", shift=0.3)
    html = write_comparison(*folders).read_text()
    for title in ("Reward", "Length of completions"):
        figure = next(part for part in html.split("<figure") if f"<h2>{title}</h2>" in part)
        assert re.findall(r'class="band (\w+)"', figure) == ["a", "b"]


@pytest.mark.slow
def test_ten_thousand_sequences_make_small_pages(tmp_path):
    recorder = RunRecorder(tmp_path)
    for step in range(1, 1251):
        recorder.record_metrics(StepMetrics(step, "train", {"reward": 0.5}, [60] * 8))
        for number in range(8):
            recorder.record_sequence(
                a_sequence(step, tokens=["word "] * 24, request_id=f"{step}-{number}")
            )
    report = write_report(tmp_path)
    assert "4,000 of 10,000 recorded sequences" in report.read_text()
    pages = list((tmp_path / PAGES_DIR).iterdir())
    assert len(pages) == MAX_STEPS_WITH_PAGES
    assert report.stat().st_size < 2**20
    assert max(page.stat().st_size for page in pages) < 2**18


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)

# Facts of a page as a browser lays it out, left in the page's own attribute for --dump-dom.
PROBE = """<script>
addEventListener("load", () => {
  const root = document.documentElement, box = node => node.getBoundingClientRect();
  document.body.dataset.facts = [
    root.scrollWidth, innerWidth, getComputedStyle(document.body).backgroundColor,
    Math.min(...[...document.querySelectorAll("svg.chart")].map(chart => box(chart).width)),
    Math.min(...[...document.querySelectorAll("path")].map(path => box(path).width)),
  ].join("|");
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on PATH")
@pytest.mark.parametrize(("width", "is_dark"), [(1400, False), (500, True)])
def test_a_browser_lays_out_reports_pages_and_comparisons(tmp_path, width, is_dark):
    folders = recorded(tmp_path / "first"), recorded(tmp_path / "second", shift=0.3)
    pages = [write_report(folders[0]), write_comparison(*folders)]
    pages.append(folders[0] / PAGES_DIR / "step_1.html")
    for path in pages:
        facts = facts_in_browser(path, width, is_dark)
        scroll_width, inner_width, background, chart_width, path_width = facts.split("|")
        assert float(scroll_width) <= float(inner_width) == width, path
        assert (max(map(int, re.findall(r"\d+", background))) < 64) is is_dark
        if "chart" in path.read_text().split("</style>")[1]:
            assert float(chart_width) > 0.35 * min(width, 1080)
            assert float(path_width) > 100


def facts_in_browser(path: Path, width: int, is_dark: bool) -> str:
    """Open a page, without its ban on scripts, and return the probe's facts."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text())
    probed = path.with_name(f"probed_{path.name}")
    probed.write_text(html.replace("</body>", f"{PROBE}</body>"))
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [scheme, f"--window-size={width},900", f"--user-data-dir={path.parent / 'browser'}"]
    dom = subprocess.run(
        [*command, "--dump-dom", probed.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    found = re.search(r'data-facts="([^"]*)"', dom)
    assert found, dom[:2000]
    return found[1]
