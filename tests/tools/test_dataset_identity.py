"""What decides results is told apart; what does not is not."""

import functools
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import byte_tokenizer, char_tokenizer, tiny_model
from tiny_vision import tiny_vision_model
from transformers import GenerationConfig

from cb_rollout.tools.dataset.identity import (
    digest_of_scorer,
    digest_of_weights,
    model_settings,
    sampling_settings,
    tokenizer_settings,
)
from cb_rollout.tools.dataset.options import DatasetOptions
from cb_rollout.tools.dataset.rows import UNREADABLE, create_source, survey


def scorer(source, name="score"):
    """The function of a module with this source."""
    module = types.ModuleType("scorers")
    # Dataclasses look their module up.
    sys.modules["scorers"] = module
    exec(compile(source, "scorers.py", "exec"), vars(module))
    return getattr(module, name)


SOURCE = """
import re, functools
LIMIT = 3
WORDS = {"one": 1, "two": 2}
PATTERN = re.compile("a+")
calls, cache = 0, []

def helper(text, more=1):
    return len(text) + more

class Grader:
    weight = 2
    def grade(self, text):
        return self.weight * len(text)

def score(row):
    global calls
    calls += 1
    found = [word for word in WORDS if word in row["completion"]]
    if row["completion"] in {"x", "y", "z"}:
        return 0
    return helper(row["completion"]) + LIMIT + len(found) + Grader().grade(PATTERN.pattern)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 0", "return 1"),
        ("LIMIT = 3", "LIMIT = 4"),
        ('"two": 2', '"three": 2'),
        ('"a+"', '"b+"'),
        ("len(text) + more", "len(text) - more"),
        ("more=1", "more=2"),
        ("weight = 2", "weight = 3"),
        ("self.weight * len", "self.weight + len"),
        ('"z"}', '"w"}'),
        ("word in row", "word not in row"),
    ],
)
def test_a_scorer_that_computes_something_else_is_told(old, new):
    assert SOURCE.count(old) == 1
    assert digest_of_scorer(scorer(SOURCE)) != digest_of_scorer(scorer(SOURCE.replace(old, new)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    global calls", "    # counts\n    global calls"),
        ("calls, cache = 0", "calls, cache = 5"),
        ("def score(row)", "def another():\n    return 7\n\ndef score(row)"),
    ],
)
def test_a_scorer_that_computes_the_same_is_not_told(old, new):
    assert digest_of_scorer(scorer(SOURCE)) == digest_of_scorer(scorer(SOURCE.replace(old, new)))


HELPERS = """
import enum, functools
from dataclasses import dataclass, field

class Base:
    words = ["one", "two"]
    def grade(self, text):
        return 11

class Grader(Base):
    __slots__ = ("slot",)
    def __init__(self):
        self.slot = 12
        self.limits = {"a": [13]}
    @staticmethod
    def fixed(text):
        return 14
    @classmethod
    def made(cls):
        return 15
    @property
    def weight(self):
        return 16
    @functools.cached_property
    def bias(self):
        return 17
    @functools.singledispatchmethod
    def kind(self, value):
        return 18
    @kind.register
    def _(self, value: int):
        return 19

class Level(enum.Enum):
    LOW = 20

@dataclass
class Limits:
    least: int = 21
    most: list = field(default_factory=lambda: [22])

@functools.lru_cache(maxsize=8)
def cached(text):
    return 23

@functools.singledispatch
def dispatched(value):
    return 24

@dispatched.register
def _(value: str):
    return 25

def traced(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 26
    return wrapper

@traced
def decorated(text):
    return 27

class Meta(type):
    def level(cls):
        return 28

class Made(metaclass=Meta):
    pass

grader = Grader()
limits = Limits()

def score(row):
    return [grader, limits, Level.LOW, cached, dispatched, decorated, Made]
"""


@pytest.mark.parametrize("number", [*range(11, 29), '"two"'])
def test_a_scorers_helper_that_computes_something_else_is_told(number):
    changed = HELPERS.replace(str(number), "99")
    assert HELPERS.count(str(number)) == 1
    assert digest_of_scorer(scorer(HELPERS)) != digest_of_scorer(scorer(changed))


def test_a_scorers_helpers_are_not_told_by_their_place_in_the_file():
    moved = HELPERS.replace("class ", "\n\nclass ")
    assert digest_of_scorer(scorer(HELPERS)) == digest_of_scorer(scorer(moved))


@pytest.mark.slow
def test_a_digest_of_a_scorer_is_the_same_in_every_process():
    own = [digest_of_scorer(scorer(source)) for source in (SOURCE, HELPERS)]
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_dataset_identity import *\n"
        "print(digest_of_scorer(scorer(SOURCE)), digest_of_scorer(scorer(HELPERS)))"
    )
    # This process has a seed drawn at random.
    found = subprocess.run(
        [sys.executable, "-c", code, *sys.path],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == own


def test_closures_partials_and_methods_are_told_by_their_values():
    def over(limit, counts=()):
        return lambda row: row["answer"] > limit

    class Scorer:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, row):
            return self.weight

        def other(self, row):
            return 0

    def weighted(weight, row):
        return weight

    made = [
        over(1), over(2), Scorer(1), Scorer(2), Scorer(1).other,
        functools.partial(weighted, 1), functools.partial(weighted, 2),
        functools.partial(over, 1), len, max,
    ]  # fmt: skip
    digests = [digest_of_scorer(each) for each in made]
    assert len({*digests}) == len(digests)
    assert digest_of_scorer(over(1)) == digests[0]
    assert digest_of_scorer(Scorer(1)) == digests[2]


def test_every_parameter_and_buffer_counts():
    model = tiny_model()
    model.register_buffer("shift", torch.zeros(3))
    own = digest_of_weights(model)
    assert digest_of_weights(model) == own
    for name, tensor in [*model.named_buffers(), *list(model.named_parameters())[:2]]:
        with torch.no_grad():
            before = tensor.clone()
            tensor.view(-1)[0] += 1
            assert digest_of_weights(model) != own, name
            tensor.copy_(before)
    assert digest_of_weights(model) == own


def test_an_adapters_scaling_counts():
    found = [
        model_settings(
            get_peft_model(tiny_model(), LoraConfig(r=4, lora_alpha=alpha)).base_model.model
        )
        for alpha in (4, 8)
    ]
    assert found[0]["config"] == found[1]["config"]
    assert found[0]["adapter_scalings"] != found[1]["adapter_scalings"]
    assert "adapter_scalings" not in model_settings(tiny_model())


def test_a_generation_config_counts_as_far_as_no_option_overrides_it():
    model, plain = tiny_model(), DatasetOptions()
    own = sampling_settings(model, plain)
    for change in (
        {"top_k": 7}, {"repetition_penalty": 1.5}, {"suppress_tokens": [3]}, {"eos_token_id": 9},
        {"sequence_bias": [[[3, 4], 2.0]]}, {"stop_strings": ["x"]}, {"do_sample": True},
    ):  # fmt: skip
        model.generation_config = GenerationConfig(**change)
        assert sampling_settings(model, plain) != own, change
        none = DatasetOptions(generation_config="none")
        assert sampling_settings(model, none) == sampling_settings(tiny_model(), none)
    model.generation_config = GenerationConfig(top_k=7, do_sample=True)
    chosen = DatasetOptions(top_k=5)
    found = sampling_settings(model, chosen)
    model.generation_config = GenerationConfig(top_k=8, do_sample=True)
    assert sampling_settings(model, chosen) == found


def test_a_tokenizer_counts_by_its_files_and_not_by_its_last_call():
    tokenizer = char_tokenizer()
    own = tokenizer_settings(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    tokenizer.name_or_path = "elsewhere"
    assert tokenizer_settings(tokenizer) == own
    assert tokenizer_settings(byte_tokenizer()) != own
    tokenizer.add_tokens(["new"])
    assert tokenizer_settings(tokenizer) != own
    assert tokenizer_settings(len) == {"class": "builtin_function_or_method"}


def test_a_processor_counts_by_how_it_reads_pictures():
    _, processor = tiny_vision_model("llava")
    own = tokenizer_settings(processor)
    assert tokenizer_settings(processor) == own
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    assert tokenizer_settings(processor) != own


def test_a_pictures_file_counts(tmp_path):
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a", "images": ["a.png", "b.png", "data:image/png;base64,AA"]}\n')
    (tmp_path / "a.png").write_bytes(b"one")
    own = survey(create_source(str(rows)), tmp_path)
    assert own.pictures.keys() == {"a.png", "b.png"}
    assert own.pictures["b.png"] == UNREADABLE
    (tmp_path / "a.png").write_bytes(b"two")
    other = survey(create_source(str(rows)), tmp_path)
    assert other.digest == own.digest
    assert other.pictures["a.png"] != own.pictures["a.png"]
