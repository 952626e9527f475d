import base64
import math
import re
from importlib.resources import files

import pytest
from full_disk import FullDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from report_page import FORBIDDEN, Page, a_sequence

from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.run_records import (
    AUDIT_FILE,
    METRICS_FILE,
    RunRecorder,
    StepMetrics,
    record_audit,
)
from cb_rollout.tools.report import write_comparison, write_report
from cb_rollout.tools.report.figures import DRIFT_KEYS, series, smoothed
from cb_rollout.tools.report.page import MAX_SEQUENCES_PER_STEP, spread
from cb_rollout.tools.report.svg import compact, linear_axis, log_axis
from cb_rollout.tools.report.tokens import MAX_TOKENS_SHOWN, NUM_LEVELS, colour_level, visible_html


def training_steps(num_steps):
    for step in range(1, num_steps + 1):
        scalars = {
            "reward": step / num_steps,
            "rollout/tokens_per_second": 1000.0 + step,
            "rollout/step_share": 0.5,
            "rollout/logprob_drift_max": 1e-6 * step,
            "sampling/sampling_logp_difference/max": 0.0,
        }
        yield StepMetrics(step, "train", scalars, [step, 2 * step])


def page_of(tmp_path, metrics=(), sequences=()):
    recorder = RunRecorder(tmp_path)
    for record in metrics:
        recorder.record_metrics(record)
    for sequence in sequences:
        recorder.record_sequence(sequence)
    html = write_report(tmp_path).read_text(encoding="utf-8")
    return html, Page(html)


def test_a_whole_run_is_one_wellformed_page_that_fetches_nothing(tmp_path):
    metrics = [*training_steps(30), StepMetrics(30, "eval", {"eval_reward": 0.9}, [5])]
    html, page = page_of(tmp_path, metrics, [a_sequence(step) for step in range(1, 31)])
    assert not re.search(r"https?:|//|@import|url\(", html)
    assert not FORBIDDEN & set(page.tags)
    assert page.tags.count("figure") == 4
    for expected in ("First to last reward", "evaluation", "Largest drift", "3.0e-5", "Step 15"):
        assert expected in page.text


def test_prompts_and_tokens_are_shown_and_never_run(tmp_path):
    hostile = '<script>alert(\'x\')</script>" onmouseover="x" &amp; \U0001f642'
    sequence = a_sequence(
        tokens=[hostile, "</span></div>", "<!--", "\ud83d"],
        prompt=f"{hostile}\x00\x1b[2J\u202e\udfff",
        request_id=hostile,
        finish_reason=hostile,
    )
    html, page = page_of(tmp_path, sequences=[sequence])
    assert page.text.count(hostile) == 4
    assert "</span></div>" in page.text
    for code in ("U+D83D", "U+DFFF", "U+202E", "U+0000", "U+001B"):
        assert code in page.text
    assert "\x00" not in html
    assert "\x1b" not in html


def test_a_hostile_run_name_is_escaped(tmp_path):
    html, page = page_of(tmp_path / "<b>&run", metrics=training_steps(1))
    assert "<b>&run" in page.text
    assert "<b>&run" not in html


@given(text=st.text(st.characters(), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_becomes_wellformed_utf8(text):
    html = visible_html(text, marks_spaces=True)
    Page(html)
    assert not set(html) & {chr(code) for code in range(32) if chr(code) not in "\t\n"}
    html.encode("utf-8")


def test_each_token_tells_its_logprob_its_id_and_its_policy(tmp_path):
    sequence = a_sequence(
        tokens=["a", "b", "c"],
        logprobs=[-0.5, math.nan, 0.0],
        token_ids=[11, 12, 13],
        policy_versions=[(3, 2), (4, 1)],
    )
    _, page = page_of(tmp_path, sequences=[sequence])
    assert page.titles == [
        "log-probability -0.500 (60.7%)\ntoken id 11\npolicy version 3",
        "log-probability not recorded\ntoken id 12\npolicy version 3",
        "log-probability 0.000 (100%)\ntoken id 13\npolicy version 4",
    ]


def test_the_last_audit_is_shown_as_it_was_written(tmp_path):
    html, page = page_of(tmp_path, sequences=[a_sequence()])
    assert "The last audit" not in page.text
    (tmp_path / AUDIT_FILE).write_text("Step 3. Adapter <missing>.\n  +1 nats\n")
    html, page = page_of(tmp_path, sequences=[a_sequence()])
    assert "The last audit:Step 3. Adapter <missing>.\n  +1 nats\n" in page.text
    assert '<pre class="prompt">Step 3. Adapter &lt;missing&gt;' in html


def test_an_audit_is_kept_beside_the_ones_before(tmp_path):
    for step in (3, 4):
        record_audit(tmp_path, f"Step {step}. Adapter missing.\n  +1 nats")
    text = (tmp_path / AUDIT_FILE).read_text()
    assert text == "Step 3. Adapter missing.\n  +1 nats\n\nStep 4. Adapter missing.\n  +1 nats\n"
    _, page = page_of(tmp_path, sequences=[a_sequence()])
    assert "The last audit:Step 4. Adapter missing.\n  +1 nats\n" in page.text
    assert "Step 3" not in page.text


def test_whitespace_and_special_tokens_can_be_seen(tmp_path):
    html, page = page_of(tmp_path, sequences=[a_sequence(tokens=["\n", "  ", "\t", "<|im_end|>"])])
    assert "\u21b5\n" in page.text
    assert "\u00b7\u00b7" in page.text
    assert "\u2192\t" in page.text
    assert re.search(r'<span class="l0 special"[^>]*>&lt;\|im_end\|&gt;</span>', html)


@given(st.lists(st.floats(max_value=0, allow_nan=False), min_size=2))
def test_the_less_likely_a_token_the_higher_its_colour(logprobs):
    levels = [colour_level(value) for value in sorted(logprobs, reverse=True)]
    assert levels == sorted(levels)
    assert set(levels) <= set(range(NUM_LEVELS))


def test_the_colours_run_from_certain_to_improbable(tmp_path):
    logprobs = [0.0, -0.5, -2.0, -5.0, -100.0]
    sequence = a_sequence(tokens="abcde", logprobs=logprobs)
    html, _ = page_of(tmp_path, sequences=[sequence])
    levels = [int(level) for level in re.findall(r'<span class="l(\d)" title', html)]
    assert levels == [0, 0, 2, 6, NUM_LEVELS - 1]


def test_every_colour_is_stronger_and_darker_than_the_one_before():
    style = files("cb_rollout.tools.report").joinpath("report.css").read_text(encoding="utf-8")
    found = re.findall(r"\.l(\d) \{ background: rgba\((\d+), (\d+), (\d+), ([\d.]+)\)", style)
    assert [int(level) for level, *_ in found] == list(range(NUM_LEVELS))
    alphas = [float(alpha) for *_, alpha in found]
    greens = [int(green) for _, _, green, _, _ in found]
    assert alphas == sorted(set(alphas))
    assert greens == sorted(set(greens), reverse=True)


def test_metrics_alone_and_rollouts_alone_leave_the_other_part_out(tmp_path):
    _, page = page_of(tmp_path / "metrics", metrics=training_steps(3))
    assert "Completions" not in page.text
    _, page = page_of(tmp_path / "rollouts", sequences=[a_sequence()])
    assert "figure" not in page.tags
    assert "1 of 1 recorded sequences" in page.text


def test_a_figure_whose_metrics_are_missing_is_left_out(tmp_path):
    _, page = page_of(tmp_path, [StepMetrics(1, "train", {"reward": 0.0}, [])])
    assert page.tags.count("figure") == 1
    assert "Tokens per second" not in page.text


@pytest.mark.parametrize("num_steps", [1, 2, 3, 12])
@pytest.mark.parametrize("value", [0.0, -1.5, 1e-12, 1e12, 1e308, -1e308, 5e-324, -5e-324])
def test_short_and_flat_runs_have_every_figure(tmp_path, num_steps, value):
    names = [name for name in next(training_steps(1)).scalars if name != "rollout/step_share"]
    metrics = [
        StepMetrics(step, "train", dict.fromkeys(names, value), [0])
        for step in range(1, num_steps + 1)
    ]
    html, page = page_of(tmp_path, metrics)
    assert page.tags.count("figure") == 3
    assert "nan" not in html
    assert "inf" not in page.text


HUGE = 1.7e308


@pytest.mark.parametrize(
    "values",
    [(1e308, -1e308), (HUGE, HUGE), (-HUGE, 0.0), (5e-324, 0.0), (1e16, 1e16 + 2), (1.0, HUGE)],
)
def test_any_finite_number_is_drawn_and_said(tmp_path, values):
    names = [*next(training_steps(1)).scalars, "reward_std", "rollout/preemptions", "entropy"]
    metrics = [
        StepMetrics(step, "train", dict.fromkeys(names, values[step % 2]), [1], [[*values]])
        for step in range(60)
    ]
    improbable = a_sequence(59, logprobs=[-HUGE, -HUGE], reward=values[0])
    html, page = page_of(tmp_path, metrics, [improbable])
    assert page.tags.count("figure") == 6
    assert not re.search(r"\bnan\b|\binf\b|\d{20}", page.text)
    assert not re.search(r'="[^"]*(nan|inf)%', html)
    assert compact(values[1]) in page.text
    assert f"log-probability {compact(-HUGE)} (0%)" in page.titles[-1]


def test_numbers_that_are_not_finite_leave_their_step_out_of_a_figure(tmp_path):
    metrics = [*training_steps(3)]
    page_of(tmp_path, metrics)
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    for bad in ("NaN", "Infinity", "-1e999"):
        lines.append(lines[-1].replace('"reward":1.0', f'"reward":{bad}').replace(":3,", ":9,"))
    (tmp_path / METRICS_FILE).write_text("\n".join([*lines, ""]))
    page = Page(write_report(tmp_path).read_text())
    assert "Last reward1at step 3" in page.text
    assert "from 1 to 9" in page.text


def test_of_many_sequences_and_many_tokens_it_says_how_many_are_shown(tmp_path):
    num = MAX_SEQUENCES_PER_STEP + 3
    long = a_sequence(tokens=["x"] * (MAX_TOKENS_SHOWN + 7))
    _, page = page_of(tmp_path, sequences=[long, *[a_sequence()] * (num - 1)])
    assert f"{MAX_SEQUENCES_PER_STEP} of {num} recorded sequences" in page.text
    assert f"7 of {MAX_TOKENS_SHOWN + 7} tokens are left out here" in page.text
    assert len(page.titles) == MAX_TOKENS_SHOWN + 2 * (MAX_SEQUENCES_PER_STEP - 1)


def test_a_sequence_without_tokens_is_shown(tmp_path):
    _, page = page_of(tmp_path, sequences=[a_sequence(tokens=[])])
    assert "0 tokens" in page.text


def test_a_run_with_no_whole_record_is_refused_with_advice(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step":')
    with pytest.raises(ConfigurationError, match="report after the first step"):
        write_report(tmp_path)


def test_the_first_middle_and_last_steps_are_shown_once_each():
    assert spread([], 3) == []
    assert spread([5], 3) == [5]
    assert spread([5, 9], 3) == [5, 9]
    assert spread(list(range(10, 15)), 3) == [10, 12, 14]


def test_a_step_recorded_again_counts_once_as_recorded_last():
    metrics = [
        StepMetrics(2, "train", {"reward": 0.1}, []),
        StepMetrics(1, "train", {"reward": 0.3}, []),
        StepMetrics(2, "train", {"reward": 0.2}, []),
        StepMetrics(2, "train", {"train_runtime": 9.0}, []),
        StepMetrics(2, "eval", {"reward": 0.9}, []),
    ]
    assert series(metrics, "reward") == [(1, 0.3), (2, 0.2)]


def test_smoothing_keeps_a_straight_line_inside_and_short_runs_whole():
    line = [(step, 2.0 * step) for step in range(60)]
    values = [value for _, value in smoothed(line)]
    assert values[10:50] == pytest.approx([value for _, value in line[10:50]])
    assert smoothed(line[:11]) == line[:11]


@given(values=st.lists(st.floats(allow_nan=False), min_size=1), low=st.sampled_from([None, 0]))
def test_an_axis_places_any_number(values, low):
    for axis in (linear_axis(values, low=low), log_axis(values, floor=1e-9)):
        assert all(0 <= axis.position(value) <= 1 for value in values)
        assert len(axis.ticks) <= 12
        assert all(math.isfinite(tick) for tick in axis.ticks)


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_a_linear_axis_holds_its_values_between_its_ticks(values):
    axis = linear_axis(values)
    assert axis.low <= min(values) + 1e-6 * abs(min(values))
    assert axis.high >= max(values) - 1e-6 * abs(max(values))
    assert 2 <= len(axis.ticks) <= 8


def test_a_log_axis_puts_zero_at_its_low_end_and_a_decade_at_equal_distances():
    axis = log_axis([0.0, 1e-6, 1e-4], floor=1e-9)
    assert axis.position(0.0) == 0 < axis.position(1e-7)
    assert [axis.label(tick) for tick in axis.ticks[:3]] == ["0", "1e-7", "1e-6"]
    without_zero = log_axis([1e-6], floor=1e-9)
    assert without_zero.label(without_zero.ticks[0]) == "1e-7"
    assert axis.position(1e-4) - axis.position(1e-5) == pytest.approx(
        axis.position(1e-5) - axis.position(1e-6)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (2.84e-6, "2.8e-6"), (0.05, "0.05"), (1480, "1,480"), (12500, "12.5k")),
        *((3e6, "3M"), (1e308, "1.0e308"), (-1e308, "-1.0e308"), (5e-324, "4.9e-324")),
    ],
)
def test_numbers_are_written_in_few_characters(value, text):
    assert compact(value) == text


def recorded_run(folder, num_steps=20):
    recorder = RunRecorder(folder / "cb_rollout")
    for metrics in training_steps(num_steps):
        recorder.record_metrics(metrics)
    return folder


def test_a_report_is_of_one_run_the_last_unless_another_is_asked_for(tmp_path):
    first = RunRecorder(tmp_path)
    for metrics in training_steps(20):
        first.record_metrics(metrics)
    _, page = page_of(tmp_path, training_steps(3), [a_sequence(2)])
    assert "from 1 to 3" in page.text
    assert "2 of 2 in this directory" in page.text
    assert "2.0e-5" not in page.text
    page = Page(write_report(tmp_path, first.run_id).read_text())
    assert "from 1 to 20" in page.text
    assert f"{first.run_id}, 1 of 2 in this directory" in page.text
    assert "Completions" not in page.text
    html = write_comparison(tmp_path, tmp_path, [first.run_id, None]).read_text()
    assert html.count("<h2>Reward</h2>") == 1
    assert first.run_id in Page(html).text


def test_the_largest_drift_is_the_largest_that_the_chart_shows(tmp_path):
    drifts = {DRIFT_KEYS[0]: 0.0, DRIFT_KEYS[1]: 4e-5}
    html, page = page_of(tmp_path, [StepMetrics(7, "train", drifts, [])])
    assert "4.0e-5nats, at step 7" in page.text
    assert re.search(r'y="100.0%" dy="0.32em">0</text>', html)


def test_two_runs_are_drawn_on_one_page_with_both_names_and_figures(tmp_path):
    first = recorded_run(tmp_path / "first")
    second = recorded_run(tmp_path / "<second>", num_steps=7)
    path = write_comparison(first, second)
    assert path == first / "cb_rollout" / "comparison.html"
    page = Page(path.read_text())
    assert not FORBIDDEN & set(page.tags)
    assert "first" in page.text
    assert "<second>" in page.text
    for label in ("Steps", "Last reward", "Tokens per second", "Largest drift"):
        assert label in page.text
    assert "from 1 to 20" not in page.text
    assert {"20", "7"} <= set(re.findall(r"\d+", page.text))
    drawn = re.findall(r'class="line (\w+)"', path.read_text())
    assert drawn.count("a") == drawn.count("b") >= 4


def test_a_metric_of_one_run_is_drawn_with_that_run_alone(tmp_path):
    first = recorded_run(tmp_path / "first")
    recorder = RunRecorder(tmp_path / "second")
    recorder.record_metrics(StepMetrics(1, "train", {"reward": 0.5}, []))
    text = write_comparison(first, tmp_path / "second").read_text()
    for title, styles in (("Throughput", ["a"]), ("Reward", ["a", "b"])):
        figure = next(part for part in text.split("<figure") if f"<h2>{title}</h2>" in part)
        assert re.findall(r'class="line (\w+)"', figure) == styles


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    first = recorded_run(tmp_path / "first")
    with pytest.raises(ConfigurationError, match="are one run; name two"):
        write_comparison(first, first / "cb_rollout")
    RunRecorder(tmp_path / "empty").record_sequence(a_sequence())
    with pytest.raises(ConfigurationError, match="holds no metrics to compare"):
        write_comparison(first, tmp_path / "empty")


def test_pictures_are_beside_their_prompts_inside_the_page(tmp_path):
    png = b"\x89PNG of a chart"
    name = RunRecorder(tmp_path).record_image(png)
    (tmp_path / "secret.png").write_bytes(b"secret")
    sequences = [
        a_sequence(images=[name]),
        a_sequence(images=[name], request_id="r1"),
        a_sequence(images=["../secret.png", "0" * 32 + ".png"], request_id="r2"),
    ]
    html, page = page_of(tmp_path, sequences=sequences)
    assert page.tags.count("img") == 1
    assert f'src="data:image/png;base64,{base64.b64encode(png).decode()}"' in html
    assert html.count('<div class="group">') == 2
    assert page.text.count("is not there any more") == 2
    assert base64.b64encode(b"secret").decode() not in html
    assert "img-src data:" in html


def test_a_disk_that_is_full_at_any_write_keeps_the_report_before(tmp_path, monkeypatch):
    page_of(tmp_path, training_steps(3), [a_sequence(1), a_sequence(2)])
    with FullDisk(tmp_path, math.inf).mounted(monkeypatch) as disk:
        path = write_report(tmp_path)
    before = path.read_bytes()
    assert disk.num_writes > 3
    for number in range(1, disk.num_writes + 1):
        with (
            FullDisk(tmp_path, number).mounted(monkeypatch),
            pytest.raises(ConfigurationError, match="No space left on device"),
        ):
            write_report(tmp_path)
        assert path.read_bytes() == before
        assert not list(tmp_path.rglob("*.partial"))
