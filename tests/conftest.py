"""No test reaches the network, reports anywhere, or depends on the speed of the machine."""

import gc
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

# Set before any test imports transformers, datasets or wandb, which read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
import torch
from hypothesis import settings
from triton_interpreter import remember_builtins

# Triton's kernels run in its interpreter where there is no GPU; it is asked for before the import.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        remember_builtins()

# The same commit passes or fails everywhere, on slow machines too.
settings.register_profile("cb_rollout", deadline=None, derandomize=True)
settings.load_profile("cb_rollout")


# A test here starts processes, or runs a real model: it lasts as long as so many others.
LONG_TESTS = {"distributed": 10, "ray": 8, "real_weights": 15, "recipes": 8}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Put the longest modules first: the short ones fill the gaps that workers have at the end."""
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
