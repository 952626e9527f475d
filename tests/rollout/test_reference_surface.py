"""The public surface of the installed transformers' continuous batching is taken, or listed.

What is listed has its reason in docs/tasks/coming_from.md.
"""

import dataclasses
import inspect
from pathlib import Path

import pytest
from tiny import tiny_model
from transformers import GenerationConfig
from transformers.generation import continuous_batching as theirs
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import requests as their_requests

import cb_rollout
from cb_rollout.compat.model_methods import METHODS
from cb_rollout.rollout.installed import ModelManager, ModelMethods

# transformers warns of its own settings.
pytestmark = pytest.mark.filterwarnings("default")

PAGE = (Path(__file__).parents[2] / "docs" / "tasks" / "coming_from.md").read_text()

# Of the package: what a user of models and managers has no object of.
LISTED_NAMES = {
    "FIFOScheduler",
    "PagedAttentionCache",
    "PrefillFirstScheduler",
    "RequestState",
    "Scheduler",
}
LISTED_MANAGER = {
    "background_thread_status",
    "batch_processor",
    "cancel_queue",
    "distributed_helper",
    "input_queue",
    "is_tp_driver",
    "logit_processor",
    "output_router",
    "switch_to_cb_friendly_attn",
}
LISTED_ARGUMENTS = {
    "generate_batch.progress_bar",
    "generate_batch.warmup",
}

OUR_NAMES = {"ContinuousBatchingManager": ModelManager, "ContinuousMixin": ModelMethods}
OURS = OUR_NAMES | {name: getattr(cb_rollout, name) for name in ("RequestStatus",)}
POSITIONAL = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


def public(names):
    return {name for name in names if not name.startswith("_")}


def differences(ours, theirs, num_own=1):
    """Names of arguments that are at another place, have another default or are missing.

    `num_own` is the number of arguments before those of transformers' method, after its own `self`.
    """
    mine = list(inspect.signature(ours).parameters.values())[num_own:]
    by_name = {parameter.name: parameter for parameter in mine}
    different = []
    for place, their in enumerate(list(inspect.signature(theirs).parameters.values())[1:]):
        our = by_name.get(their.name)
        if their.kind is inspect.Parameter.VAR_KEYWORD:
            is_taken = any(parameter.kind is their.kind for parameter in mine)
        elif our is None:
            is_taken = False
        else:
            has_place = their.kind not in POSITIONAL or mine[place : place + 1] == [our]
            has_default = their.default in (inspect.Parameter.empty, our.default)
            is_taken = has_place and has_default
        if not is_taken:
            different.append(their.name)
    return different


def methods_of(kind):
    names = public(vars(kind)) | {"__init__", "__iter__"}
    return sorted(name for name in names if callable(vars(kind).get(name)))


def their_manager():
    config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    generation_config = GenerationConfig(max_new_tokens=4, eos_token_id=1)
    return tiny_model().init_continuous_batching(generation_config, config)


def test_every_public_name_is_taken_or_listed():
    assert set(theirs.__all__) - set(OURS) <= LISTED_NAMES
    assert not set(OURS) & LISTED_NAMES


@pytest.mark.parametrize("name", methods_of(theirs.ContinuousBatchingManager))
def test_a_method_of_the_manager_has_the_arguments_of_transformers(name):
    if name in LISTED_MANAGER:
        assert not hasattr(ModelManager, name)
        return
    their = vars(theirs.ContinuousBatchingManager)[name]
    kinds = [cb_rollout.ContinuousBatchingManager]
    if name != "__init__":
        kinds.append(ModelManager)
    for kind in kinds:
        assert differences(getattr(kind, name), their) == []


def test_an_attribute_of_the_manager_is_taken_or_listed():
    ours = cb_rollout.ContinuousBatchingManager(tiny_model())
    missing = {name for name in public(vars(their_manager())) if not hasattr(ours, name)}
    assert missing <= LISTED_MANAGER
    assert not [name for name in LISTED_MANAGER if hasattr(ours, name)]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_an_installed_model_has_the_arguments_of_transformers(name):
    their = vars(theirs.ContinuousMixin)[name]
    # Ours has the model after itself.
    assert differences(getattr(ModelMethods, name), their, num_own=2) == []


def test_every_method_of_a_model_is_installed():
    assert set(methods_of(theirs.ContinuousMixin)) - {"__init__"} == set(METHODS)


def test_the_function_has_the_arguments_of_the_method():
    their = theirs.ContinuousMixin.generate_batch
    different = differences(cb_rollout.generate_batch, their)
    assert {f"generate_batch.{name}" for name in different} == LISTED_ARGUMENTS


def test_an_output_has_the_fields_and_methods_of_transformers():
    ours, their = cb_rollout.GenerationOutput("a"), their_requests.GenerationOutput("a")
    names = {field.name for field in dataclasses.fields(their)}
    assert names <= {field.name for field in dataclasses.fields(ours)}
    assert {name for name in public(dir(their)) if not hasattr(ours, name)} == set()
    for name in names - {"created_time"}:
        assert getattr(ours, name) == getattr(their, name)
    assert ours.is_finished() == their.is_finished()


def test_every_status_of_transformers_is_ours():
    names = set(their_requests.RequestStatus.__members__)
    assert names <= set(cb_rollout.RequestStatus.__members__)


@pytest.mark.parametrize(
    "listed", sorted(LISTED_NAMES | LISTED_MANAGER | {"progress_bar", "warmup"})
)
def test_what_is_listed_has_its_reason_in_the_documents(listed):
    assert f"`{listed}`" in PAGE


def test_a_missing_argument_another_default_and_another_place_are_noticed():
    class Their:
        def method(self, a, b=1, **more): ...

    class Ours:
        def same(self, a, b=1, c=2, **other): ...
        def missing(self, a, **more): ...
        def other_default(self, a, b=2, **more): ...
        def other_place(self, b=1, a=None, **more): ...
        def none_more(self, a=3, b=1): ...

    found = {
        name: differences(getattr(Ours, name), Their.method)
        for name in vars(Ours)
        if name[0] != "_"
    }
    assert found == {
        "same": [],
        "missing": ["b"],
        "other_default": ["b"],
        "other_place": ["a", "b"],
        "none_more": ["more"],
    }
