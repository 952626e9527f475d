"""The Python that the pages show, run by the tests of what it shows."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def block(heading: str, page: str = "CONTRIBUTING.md") -> str:
    """Return the first Python block under a heading of a page."""
    text = (ROOT / page).read_text()
    (section,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", text, re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)[0]


def run(source: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a block, with names defined; return all names."""
    names = {} if names is None else names
    # A dataclass looks for the module that it is defined in.
    names.setdefault("__name__", __name__)
    exec(compile(source, "documented block", "exec"), names)
    return names
