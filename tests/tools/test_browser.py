"""The report, a comparison and the live page in a real browser, light and dark, narrow and wide."""

import math
import random

import pytest
from browser import FAINT, WIDE, Browser, browser_path
from report_page import a_sequence
from test_watch import served

from cb_rollout.metrics.run_records import RunRecorder, StepMetrics
from cb_rollout.tools.report import write_comparison, write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser_path() is None, reason="no Chromium: apt-get install chromium"),
]

# WCAG 2: large text and marks, and hints that say again what a text says.
LEAST_CONTRAST = 3.0

# Texts of the charts' hover bands that are visible.
SHOWN = """[...document.querySelectorAll('.tip text')].filter(
  text => text.getClientRects().length
).map(text => text.textContent)"""
WORDS = ["The", "answer", "is", "42", ",", "since", "6", "times", "7", "makes", "that", "many", "."]


def record_run(folder, seed):
    """Record 60 steps that have every figure, advice, long words and a long prompt."""
    settings = {"Trainer": {"learning_rate": 1e-5 * seed, "reward functions": "is_right" * 40}}
    draw, recorder = random.Random(seed), RunRecorder(folder, lambda: settings)
    for step in range(1, 61):
        noise = draw.random()
        scalars = {
            "reward": step / 60 + noise / 8,
            "reward_std": 0.2,
            "entropy": 2 - step / 60,
            "loss": (noise - 0.5) / 10,
            "kl": step / 1e4,
            "grad_norm": 1 + noise,
            "learning_rate": 1e-5 * (1 - step / 61),
            "step_seconds": 4 + noise,
            "memory_gib": 2.5,
            "rewards/is_right/mean": noise,
            "rewards/is_of_a_long_name_that_somebody_gave_it/mean": 1 - noise,
            "completions/mean_length": 80 + 20 * noise,
            "completions/clipped_ratio": 0.5,
            "frac_reward_zero_std": 0.7,
            "rollout/tokens_per_second": 12_000 + 900 * noise,
            "rollout/step_share": 0.85,
            "rollout/logprob_drift_max": 1e-6 * math.exp(step / 8),
            "sampling/sampling_logp_difference/max": 1e-3 * noise,
        }
        rewards = [[draw.choice([0.0, 1.0]) for _ in range(4)] for _ in range(4)]
        recorder.record_metrics(StepMetrics(step, "train", scalars, [40, 90, 120], rewards))
        tokens = [f" {draw.choice(WORDS)}" for _ in range(60)] + ["\n", "x" * 200, "<|im_end|>"]
        logprobs = [-draw.expovariate(0.4) for _ in tokens]
        prompt = f"{'What is six times seven? ' * 40}{'y' * 300}"
        named = {"tokens": tokens, "logprobs": logprobs, "request_id": f"request_{step}_{'0' * 40}"}
        recorder.record_sequence(a_sequence(step, prompt=prompt, **named))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        record_run(folder, seed)
    return folders


def require_readable(browser, address, width, scheme, path):
    """Open a page, and hold it to what every page must be; keep a picture of it."""
    browser.open(address, width, scheme)
    browser.screenshot(path)
    assert browser.logged == []
    own = address if address.startswith("http") else "file://"
    assert browser.requested
    assert all(url.startswith((own, "data:")) for url in browser.requested), browser.requested
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(WIDE) == []
    assert browser.value(FAINT % LEAST_CONTRAST) == []
    dark = browser.value("getComputedStyle(document.body).backgroundColor").startswith("rgb(1")
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("page", ["report", "step", "comparison", "watch", "waiting"])
def test_a_page_is_readable(browser, runs, tmp_path, page, width, scheme):
    picture = tmp_path / f"{page}_{width}_{scheme}.png"
    if page in ("watch", "waiting"):
        with served(runs[0] if page == "watch" else tmp_path / "later") as server:
            require_readable(browser, server.url, width, scheme, picture)
        return
    path = write_comparison(*runs) if page == "comparison" else write_report(runs[0])
    if page == "step":
        path = path.parent / "report_pages" / "step_30.html"
    require_readable(browser, path.as_uri(), width, scheme, picture)


def test_the_page_of_a_run_follows_it_in_the_browser(browser, tmp_path):
    with served(tmp_path / "run") as server:
        browser.open(server.url, 800, "light")
        assert browser.value("document.querySelectorAll('figure').length") == 0
        record_run(tmp_path / "run", 0)
        browser.open(server.url, 800, "light")
        assert browser.value("document.querySelectorAll('figure').length") == 15
        assert browser.value("document.querySelector('meta[http-equiv=refresh]').content") == "3"


@pytest.mark.parametrize("width", [400, 1400])
def test_the_values_of_a_step_are_shown_where_the_pointer_is(browser, runs, width):
    browser.open(write_report(runs[0]).as_uri(), width, "light")
    place = "document.querySelector('.wide .chart .tip:nth-of-type(30) rect')"
    x = browser.value(f"{place}.scrollIntoView(), {place}.getBoundingClientRect().x + 1")
    y = browser.value(f"{place}.getBoundingClientRect().y + 40")
    assert browser.value(SHOWN) == []
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    (text,) = browser.value(SHOWN)
    assert text.startswith("step ")
    assert browser.value(WIDE) == []


def test_a_fault_of_a_page_is_seen(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text(
        "<body style='background:#111111'><p style='width:900px;color:#333'>faint</p>"
        "<img src='http://127.0.0.1:9/x.png'><script>console.error('oh')</script>"
    )
    browser.open(path.as_uri(), 400, "dark")
    assert any("oh" in line for line in browser.logged)
    assert any(url.startswith("http://127.0.0.1:9") for url in browser.requested)
    assert browser.value("document.documentElement.scrollWidth") > 400
    assert browser.value(WIDE)
    assert "faint" in browser.value(FAINT % LEAST_CONTRAST)[0]
