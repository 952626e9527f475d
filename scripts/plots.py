"""Draw the recorded benchmarks as PNG and SVG beside them.

python scripts/plots.py
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"


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
    """Plot the reward by minutes of training, a line for each run."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    colours = dict(
        zip(dict.fromkeys(run["path"] for run in record["runs"]), ("C0", "C7"), strict=False)
    )
    for run in record["runs"]:
        seconds, rewards = zip(*run["curve"], strict=True)
        minutes = [value / 60 for value in seconds]
        label = run["path"] if run["seed"] == 0 else None
        axes.plot(minutes, rewards, color=colours[run["path"]], alpha=0.7, label=label)
    axes.set(
        xlabel="minutes of training", ylabel="reward",
        title=f"SmolLM2-135M-Instruct learns sums, {record['device']}",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


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
