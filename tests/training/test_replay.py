"""An attached trainer learns what a stock one learns from the same completions, in each setting."""

import gc
import re
from dataclasses import replace

import pytest
from replay import (
    FLOAT32,
    Tolerance,
    assert_equal_trainings,
    create_trainer,
    ignoring_advice,
    train_attached,
    train_from_saved,
    train_stock,
)

from cb_rollout import ConfigurationError, RolloutConfig, attach
from pages.replay_table import FAST, REPLAYS

SLOW = [pytest.mark.slow]
# Of the settings beside the fast ones, CI trains every third; the others are trained by night.
SLOW_EVERY = 3


@pytest.fixture(autouse=True)
def what_was_imported_is_no_garbage():
    """Each `train()` collects garbage, which takes longer than the rest of a setting."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the models, of which each family is saved once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def create(tmp_path, models, monkeypatch):
    return lambda setting: create_trainer(setting, tmp_path, models, monkeypatch)


def cases(settings):
    params = []
    for number, setting in enumerate(settings):
        marks = []
        if number >= FAST:
            marks = [pytest.mark.nightly if number % SLOW_EVERY else pytest.mark.slow]
        if setting.differs is not None:
            marks.append(pytest.mark.xfail(strict=True, reason=setting.differs))
        params.append(pytest.param(setting, marks=marks, id=setting.name))
    return params


def test_no_two_settings_have_one_name():
    names = [setting.name for setting in REPLAYS]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize("setting", cases(s for s in REPLAYS if not s.refused))
def test_a_stock_trainer_learns_the_same_from_the_same_completions(create, setting, tmp_path):
    if "saved" in setting.parts:
        ours = train_from_saved(create, setting, str(tmp_path / "rollouts"))
    else:
        ours = train_attached(create(setting), setting)
    theirs = train_stock(create(setting), setting, ours.turns)
    tolerance = Tolerance.of_layouts(setting, theirs, create) if setting.is_coarse else FLOAT32
    assert_equal_trainings(ours, theirs, tolerance)


@pytest.mark.parametrize("setting", [pytest.param(s, id=s.name) for s in REPLAYS if s.refused])
def test_what_cannot_be_equal_is_refused(create, setting):
    trainer = create(setting)
    with (
        ignoring_advice(),
        pytest.raises(ConfigurationError, match=re.escape(setting.refused)),
    ):
        attach(trainer, RolloutConfig(**setting.rollout))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dapo, several steps a rollout", {"epsilon": 0.19}),
        pytest.param("dapo, several steps a rollout", {"temperature": 1.001}, marks=SLOW),
        pytest.param("KL with a reference model", {"beta": 0.202}, marks=SLOW),
        pytest.param("KL with a reference model", {"max_grad_norm": 0.999}, marks=SLOW),
    ],
)
def test_a_small_change_of_a_setting_is_seen(create, name, change):
    setting = next(s for s in REPLAYS if s.name == name)
    ours = train_attached(create(setting), setting)
    changed = replace(setting, trainer=setting.trainer | change)
    theirs = train_stock(create(changed), changed, ours.turns)
    with pytest.raises(AssertionError):
        assert_equal_trainings(ours, theirs)


@pytest.mark.slow
def test_padding_moves_a_stock_trainer_by_less_than_is_tolerated(create):
    setting = REPLAYS[0]
    ours = train_attached(create(setting), setting)
    theirs = train_stock(create(setting), setting, ours.turns)
    padded = replace(setting, trainer=setting.trainer | {"pad_to_multiple_of": 16})
    other = train_stock(create(padded), padded, ours.turns)
    assert_equal_trainings(other, theirs)
    assert theirs.distance(other) > 0
