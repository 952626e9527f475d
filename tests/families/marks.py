"""What the release of transformers that the tables are of is needed for."""

import pytest
import transformers
from packaging.version import Version

# The tables of these tests, and docs/architectures.md, name the types of this release.
NEWEST = "5.23"
IS_NEWEST = Version(transformers.__version__) >= Version(NEWEST)
of_the_newest = pytest.mark.skipif(
    not IS_NEWEST, reason=f"tables and documents name the types of transformers {NEWEST}"
)
