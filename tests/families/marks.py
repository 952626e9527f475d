"""Which types every test run checks."""

from collections.abc import Iterable

import pytest


def slow_beside(core: Iterable[str], types: Iterable[str]) -> list:
    """Mark the types that are not of the core as slow."""
    return [pytest.param(t, marks=() if t in core else pytest.mark.slow) for t in types]
