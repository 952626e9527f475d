"""Results as text. Loads no framework, since the README's tables are written with it.

Results are groups of rows. A row is a contender's figures, compared with the group's first row, or
a mapping of plain figures.
"""

from collections.abc import Iterator
from typing import Any

OURS = "cb_rollout"
SHARES = {
    "matmul_share": "of the matmul bound",
    "forwards_matmul_share": "of its own forwards' bound",
    "forwards_products_share": "are its own forwards' products",
}
UNITS = {"tokens_per_second": "tokens/s", "seconds": "s"}


def times_better(base: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how many times as fast `base` is as `other`; 0 where either median is 0."""
    slow, fast = other["median"], base["median"]
    if base["unit"] == "seconds":
        slow, fast = fast, slow
    return fast / slow if slow else 0.0


def number_text(value: float) -> str:
    """Format a number with three digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def value_text(value: float, unit: str) -> str:
    """Format a median with its unit."""
    return f"{number_text(value)} {UNITS.get(unit, unit.replace('_', ' '))}"


def print_table(results: dict[str, Any]) -> None:
    """Print every group, a line for each row."""
    for group, rows in results.items():
        width = max(map(len, rows))
        print(f"\n{group}")
        for name, row in rows.items():
            print(f"  {name:<{width}}  {'  '.join(_cells(name, row, rows))}")


def _cells(name: str, row: Any, rows: dict[str, Any]) -> Iterator[str]:
    if not isinstance(row, dict):
        yield f"{number_text(row):>10}"
        return
    if "median" not in row:
        for figure, value in row.items():
            yield f"{number_text(value):>8} {figure.replace('_', ' ')}"
        return
    yield f"{value_text(row['median'], row['unit']):>18}"
    yield f"({number_text(row['min'])} to {number_text(row['max'])})"
    base = next(iter(rows))
    if name != base and (times := times_better(rows[base], row)):
        yield f"cb_rollout is {times:.2f}x" if base == OURS else f"{1 / times:.2f}x {base}"
    yield from (f"{row[share]:.0%} {text}" for share, text in SHARES.items() if share in row)
    if "peak_resident_mib" in row:
        yield f"peak {row['peak_resident_mib']:,.0f} MiB"
