"""Draws the recorded benchmarks as PNG and SVG beside them.

python scripts/plots.py
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"


def save(figure: plt.Figure, name: str) -> None:
    """Write one plot in both forms."""
    for suffix in ("png", "svg"):
        path = BENCHMARKS / f"{name}.{suffix}"
        figure.savefig(
            path, dpi=120, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None
        )
        print(f"written to {path}")


def draw_scaling(record: dict) -> plt.Figure:
    """Throughput against concurrency, a line a contender."""
    figure, axes = plt.subplots(figsize=(6, 3.5))
    results = record["results"]
    counts = [int(name.split()[0]) for name in results]
    for contender in next(iter(results.values())):
        figures = [results[f"{count} requests"][contender] for count in counts]
        axes.plot(counts, [f["median"] for f in figures], marker="o", label=contender)
        axes.fill_between(
            counts, [f["min"] for f in figures], [f["max"] for f in figures], alpha=0.2
        )
    axes.set(
        xscale="log", xlabel="requests at once", ylabel="tokens per second",
        title=f"Rollout of 64 tokens each, {record['device']}, {record['threads']} threads",
    )  # fmt: skip
    axes.set_xticks(counts, [str(count) for count in counts], minor=False)
    axes.minorticks_off()
    axes.legend()
    return figure


def draw_step(record: dict) -> plt.Figure:
    """Seconds of one GRPO step, a bar a contender."""
    figure, axes = plt.subplots(figsize=(6, 2.2))
    contenders = record["results"]["grpo_step"]
    names = list(contenders)[::-1]
    bars = axes.barh(names, [contenders[name]["median"] for name in names])
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.set(xlabel="seconds", title="One GRPO step through TRL")
    axes.margins(x=0.12)
    return figure


PLOTS = {"scaling_cpu": draw_scaling, "step_cpu": draw_step}


def main() -> None:
    """Draw every plot whose record is there."""
    for name, draw in PLOTS.items():
        path = BENCHMARKS / f"{name}.json"
        if path.exists():
            save(draw(json.loads(path.read_text())), name)


if __name__ == "__main__":
    main()
