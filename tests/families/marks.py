"""Which types every test run checks."""

from collections.abc import Iterable

import pytest
import transformers
from packaging.version import Version

# The tables of these tests, and docs/architectures.md, name the types of this release.
NEWEST = "5.23"
IS_NEWEST = Version(transformers.__version__) >= Version(NEWEST)
of_the_newest = pytest.mark.skipif(
    not IS_NEWEST, reason=f"tables and documents name the types of transformers {NEWEST}"
)


def slow_beside(core: Iterable[str], types: Iterable[str]) -> list:
    """Mark the types that are not of the core as slow."""
    return [pytest.param(t, marks=() if t in core else pytest.mark.slow) for t in types]
