"""No test reaches the network, reports anywhere, or depends on the speed of the machine."""

import gc
import os
import sys
from collections import Counter, defaultdict
from importlib.util import find_spec
from pathlib import Path

# Set before any test imports transformers, datasets or wandb, which read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import sticky_errors
import torch
from nightly import kept_by_day
from triton_interpreter import remember_builtins

# Triton's kernels run in its interpreter where there is no GPU; it is asked for before the import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        remember_builtins()
else:
    # Each tiny model would have a child process with the device.
    os.environ.setdefault("CB_ROLLOUT_QUALIFY", "0")

# A machine with a card that lacks it runs the tests that need none.
if find_spec("hypothesis"):
    from hypothesis import settings

    # The same commit passes or fails everywhere, on slow machines too.
    settings.register_profile("cb_rollout", deadline=None, derandomize=True)
    settings.load_profile("cb_rollout")


# A test here starts processes, or runs a real model: it lasts as long as so many others.
LONG_TESTS = {"distributed": 10, "ray": 8, "real_weights": 15, "recipes": 8}


def mark_the_other_cases_slow(items):
    """Mark the cases of a test slow that its `fast_cases` does not name.

    Where it names none of those that were collected, all of them stay as they are: whoever asks for
    a case by its id gets it, and a name that no case has any more hides none.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast_cases"):
            cases[item.path, item.originalname].append(item)
    for collected in cases.values():
        named = collected[0].get_closest_marker("fast_cases").args
        if not any(item.callspec.id in named for item in collected):
            continue
        for item in collected:
            is_marked = item.get_closest_marker("slow") or item.get_closest_marker("nightly")
            if item.callspec.id not in named and not is_marked:
                item.add_marker(pytest.mark.slow)


def leave_most_cases_to_the_night(items):
    """Mark most slow cases of a parametrized test nightly; see `nightly.kept_by_day`.

    A case that is asked for by its id is alone, and stays as it is.
    """
    cases = defaultdict(list)
    for item in items:
        is_slow = item.get_closest_marker("slow") and not item.get_closest_marker("nightly")
        if is_slow and hasattr(item, "callspec"):
            cases[item.path, item.cls, item.originalname].append(item)
    for collected in cases.values():
        kept = kept_by_day(len(collected))
        for number, item in enumerate(collected):
            if number not in kept:
                item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark slow and nightly cases before `-m` selects; then put the longest modules first.

    The short ones fill the gaps that workers have at the end.
    """
    mark_the_other_cases_slow(items)
    leave_most_cases_to_the_night(items)
    yield
    num_tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: -num_tests[item.path] * LONG_TESTS.get(item.path.parent.name, 1),
    )


def leave_modules_out_of_collections():
    """Freeze all that is alive: every trainer collects, and would look at it each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    """Leave out what the tests' modules import."""
    leave_modules_out_of_collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Leave out what the tests of a module have imported, once its fixtures are gone."""
    if nextitem is not None and nextitem.path != item.path:
        leave_modules_out_of_collections()


def pytest_exception_interact(call):
    """End this process after an error that leaves CUDA unusable in it."""
    sticky_errors.end_process_after(call.excinfo.value)


def pytest_sessionfinish():
    """Let modules be collected at exit: xgrammar reports its objects as leaked otherwise."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_bitwise_operators_are_left():
    """They serve every model of the process: fail the test that leaves them."""
    yield
    operators = sys.modules.get("cb_rollout.engine.numerics.operators")
    assert operators is None or not operators.are_installed(), "detach the trainer"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of a real model, SmolLM2-135M-Instruct, with its tokenizer."""
    from smollm2 import smollm2_folder

    try:
        return smollm2_folder()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
