"""Each pair of features that is refused has one entry, one place that refuses it, and a line."""

import re
from pathlib import Path

import pytest

from cb_rollout import ConfigurationError, RolloutConfig
from cb_rollout.config.combinations import COMBINATIONS, described, refused

PACKAGE = Path(__file__).parents[2] / "cb_rollout"


def test_every_pair_is_refused_in_one_place():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    raised = sorted(name for s in sources for name in re.findall(r'refused\(\s*"([^"]+)"', s))
    assert raised == sorted(COMBINATIONS)


def test_a_reason_names_its_values_and_a_reader_sees_none():
    error = refused("bitwise, dropout", rate="0.1")
    assert isinstance(error, ConfigurationError)
    assert "(rate 0.1)" in str(error)
    assert "(rate ...)" in described(COMBINATIONS["bitwise, dropout"])


def test_a_config_refuses_its_own_pairs():
    with pytest.raises(ConfigurationError, match=r"numerics='bitwise': rollout_dtype='float16'"):
        RolloutConfig(numerics="bitwise", rollout_dtype="float16")
