"""Draw the recorded benchmarks as PNG and SVG beside them.

python scripts/pages/plots.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"


def save(figure: plt.Figure, name: str, folder: Path) -> None:
    """Write one plot as PNG and SVG."""
    for suffix in ("png", "svg"):
        path = folder / f"{name}.{suffix}"
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata=metadata)
        print(f"written to {path}")
    plt.close(figure)


def draw_scaling(record: dict[str, Any]) -> plt.Figure:
    """Plot throughput by concurrent requests, a line for each contender."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    points = {
        int(name.split()[0]): contenders
        for name, contenders in record["results"].items()
        if name.endswith(" requests")
    }
    # A contender may be left out of a point that would take it too long.
    for contender in dict.fromkeys(name for point in points.values() for name in point):
        found = {count: point[contender] for count, point in points.items() if contender in point}
        medians, low, high = ([f[key] for f in found.values()] for key in ("median", "min", "max"))
        axes.plot(list(found), medians, marker="o", label=contender)
        axes.fill_between(list(found), low, high, alpha=0.2)
    axes.set(
        xscale="log", xlabel="requests at once", ylabel="tokens per second",
        title=f"Throughput, {record['device']}, {record['threads']} threads",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xticks(list(points), [f"{count:,}" for count in points], minor=False)
    axes.minorticks_off()
    axes.legend()
    return figure


def draw_step(record: dict[str, Any]) -> plt.Figure:
    """Plot the seconds of one GRPO step, a bar for each contender."""
    figure, axes = plt.subplots(figsize=(6, 2.2))
    contenders = record["results"]["grpo_step"]
    names = list(contenders)[::-1]
    colours = ["tab:blue" if name.startswith("cb_rollout") else "tab:gray" for name in names]
    bars = axes.barh(names, [contenders[name]["median"] for name in names], color=colours)
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.set(xlabel="seconds", title="One GRPO step through TRL")
    axes.margins(x=0.12)
    return figure


def draw_learning(record: dict[str, Any]) -> plt.Figure:
    """Plot the reward by minutes of training: a line for each path, the mean of its seeds."""
    figure, axes = plt.subplots(figsize=(6, 3.2))
    colours = {"cb_rollout": "#1f77b4", "TRL's own": "#888888"}
    for path, colour in colours.items():
        runs = [run["curve"] for run in record["runs"] if run["path"] == path]
        for curve in runs:
            minutes = [seconds / 60 for seconds, _ in curve]
            rewards = [reward for _, reward in curve]
            axes.plot(minutes, rewards, color=colour, alpha=0.2, linewidth=1)
        minutes, means = mean_curve(runs, record["minutes"])
        axes.plot(minutes, means, color=colour, linewidth=2.5)
        label = "with cb_rollout" if path == "cb_rollout" else "TRL alone"
        axes.annotate(label, (minutes[-1], means[-1]), xytext=(6, 0), textcoords="offset points",
                      color=colour, va="center", fontweight="bold")  # fmt: skip
    axes.set(
        xlabel="minutes of training on two CPU cores", ylabel="share of right answers",
        xlim=(0, record["minutes"]), title="SmolLM2-135M learns sums by GRPO",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def mean_curve(
    runs: list[list[tuple[float, float]]], num_minutes: float
) -> tuple[list[float], list[float]]:
    """Return minutes, and the reward at each: the mean over runs of the last minute's steps.

    A run without a step in that time counts with its last step before.
    """
    minutes = [0.5 * number for number in range(3, int(2 * num_minutes) + 1)]
    means = []
    for minute in minutes:
        values = []
        for curve in runs:
            before = [(seconds, reward) for seconds, reward in curve if seconds <= 60 * minute]
            recent = [reward for seconds, reward in before if seconds > 60 * (minute - 1)]
            if before:
                values.append(sum(recent) / len(recent) if recent else before[-1][1])
        means.append(sum(values) / len(values) if values else 0.0)
    return minutes, means


PLOTS = {"scaling_cpu": draw_scaling, "step_cpu": draw_step, "learning_cpu": draw_learning}


def main(arguments: list[str] | None = None) -> None:
    """Draw every plot whose record exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=BENCHMARKS, help="directory of the records")
    folder = parser.parse_args(arguments).folder
    for name, draw in PLOTS.items():
        path = folder / f"{name}.json"
        if path.exists():
            save(draw(json.loads(path.read_text())), name, folder)


if __name__ == "__main__":
    main()
