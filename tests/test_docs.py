"""What the documents say exists: commands, settings, names, files, links."""

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import documented
import pytest
import torch
from tiny import byte_tokenizer, tiny_model
from transformers import CompileConfig

import bench
import cb_rollout
from cb_rollout import RolloutConfig, strategies
from cb_rollout.integrations.async_grpo import AsyncRollouts
from cb_rollout.integrations.ray import RolloutPool
from cb_rollout.metrics.run_records import read_metrics
from cb_rollout.tools.cli import create_parser
from cb_rollout.tools.cli.command import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_PARTLY
from pages.costs_table import COSTS
from pages.metrics_table import HISTOGRAMS, METRICS
from pages.pictures import DRAWN, PICTURES
from pages.replay_table import REPLAYS
from pages.site_pages import (
    DOCS,
    FIRST_SCREEN,
    HOME,
    PAGES,
    first_screen,
    linked_files,
    parts,
)
from write_docs import COMMAND_LINE_HEADER

ROOT = Path(__file__).parents[1]
DECISIONS = ROOT / "docs" / "decisions"
BENCHMARKS = ROOT / "docs" / "benchmarks"
PYPROJECT = (ROOT / "pyproject.toml").read_text()

EVERY_PAGE = [
    *PAGES,
    "AGENTS.md",
    "llms.txt",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / DOCS).rglob("*.md"))),
]
# These tell what was, so the names in them may be gone.
HISTORY = ("CHANGELOG.md", "docs/dev/LOG.md", "docs/decisions/")
CURRENT_PAGES = [page for page in EVERY_PAGE if not page.startswith(HISTORY)]

every_page = pytest.mark.parametrize("page", EVERY_PAGE)
current_page = pytest.mark.parametrize("page", CURRENT_PAGES)

# Settings of others that the pages name: transformers', FSDP's, TRL's, OpenAI's.
FOREIGN_SETTINGS = {
    "callbacks",
    "device_map",
    "disable_tqdm",
    "experts_implementation",
    "is_decoder",
    "gradient_accumulation_steps",
    "use_orig_params",
    "use_vllm",
    "loss_type",
    "normalize_advantages",
    "scale_rewards",
    "skip_special_tokens",
    "torch_compile",
    "vllm_importance_sampling_mode",
    "extra_body",
    "logprobs",
}

OWN_FOLDERS = ("cb_rollout/", "docs/", "recipes/", "scripts/", "tests/")


def fenced(page: str, language: str | None = None) -> Iterator[str]:
    """Yield the contents of a page's code blocks, all or of one language."""
    for part, is_code in parts((ROOT / page).read_text()):
        if is_code:
            first, *lines, _ = part.strip("\n").splitlines()
            if language is None or first.strip(" `") == language:
                yield "\n".join(lines)


def inline(page: str) -> Iterator[str]:
    """Yield a page's code spans."""
    for part, is_code in parts((ROOT / page).read_text()):
        if not is_code:
            yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", part))


def commands(page: str, start: str = "cb-rollout ") -> Iterator[list[str]]:
    """Yield the words behind each `start` of a page, in blocks and in spans."""
    for span in inline(page):
        if span.startswith(start):
            yield span.removeprefix(start).split()
    for block in fenced(page):
        for line in block.replace("\\\n", " ").splitlines():
            typed = line.strip().removeprefix("$ ")
            if typed.startswith(start):
                yield typed.removeprefix(start).split()


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in create_parser()._actions if isinstance(a.choices, dict))
    return action.choices


def expressions(page: str) -> Iterator[ast.AST]:
    """Yield the syntax trees of a page's Python: blocks, and spans that are calls."""
    yield from (ast.parse(block) for block in fenced(page, "python"))
    for span in inline(page):
        if re.fullmatch(r"[\w.]+\(.+\)", span):
            try:
                yield ast.parse(span)
            except SyntaxError:
                # A placeholder such as `RolloutGenerator(optimizer=)`.
                continue


@functools.cache
def callables() -> dict[str, Any]:
    """Return what pages call by name: public names, strategies, methods of generator and pool."""
    names = (name for name in cb_rollout.__all__ if not name.endswith("Error"))
    public = {name: getattr(cb_rollout, name) for name in names}
    groups = {name: getattr(strategies, name) for name in strategies.__all__}
    generator = public["RolloutGenerator"]
    methods = {f"generator.{n}": m for n, m in vars(generator).items() if inspect.isfunction(m)}
    methods |= {f"pool.{n}": m for n, m in vars(RolloutPool).items() if inspect.isfunction(m)}
    return public | groups | methods | {"AsyncRollouts": AsyncRollouts, "RolloutPool": RolloutPool}


def accepts(function: Any, keyword: str) -> bool:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or keyword in parameters


@functools.cache
def settings() -> set[str]:
    named = {name for known in callables().values() for name in inspect.signature(known).parameters}
    # TRL's, with which its trainers are made by tests/training/test_replay.py.
    replayed = {name for replay in REPLAYS for name in replay.trainer}
    compiled = {field.name for field in dataclasses.fields(CompileConfig)}
    return named | FOREIGN_SETTINGS | replayed | compiled


def resolves(dotted: str) -> bool:
    """Tell whether a dotted name is a module or an attribute of one."""
    module, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        return bool(module) and resolves(module) and hasattr(importlib.import_module(module), name)
    return True


@current_page
def test_every_command_and_option_on_a_page_exists(page):
    parsers = subcommands()
    for words in commands(page):
        name, *rest = words
        assert name in parsers or name.startswith(("-", "COMMAND")), f"cb-rollout {name}"
        options = {
            word.split("=")[0].strip("[]") for word in rest if word.strip("[").startswith("--")
        }
        assert options <= set(parsers[name]._option_string_actions), " ".join(words)


@current_page
def test_every_workload_on_a_page_exists(page):
    for words in commands(page, "python scripts/bench.py "):
        assert words[0] in {"WORKLOAD", "--help", *bench.WORKLOADS}


@current_page
def test_the_python_of_a_page_imports_what_there_is(page):
    for block in fenced(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "cb_rollout":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


@current_page
def test_calls_on_a_page_pass_parameters_that_exist(page):
    for tree in expressions(page):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removeprefix("cb_rollout.")
                if name in callables():
                    for keyword in node.keywords:
                        assert keyword.arg is None or accepts(callables()[name], keyword.arg), (
                            f"{name}({keyword.arg}=)"
                        )


@current_page
def test_every_setting_in_a_span_exists(page):
    for span in inline(page):
        if match := re.match(r"(\w+)=(?!=)", span):
            assert match[1] in settings(), span


FIELDS = {field.name for field in dataclasses.fields(RolloutConfig)}


@current_page
def test_every_value_given_to_a_setting_of_the_engine_is_one_it_takes(page):
    for span in inline(page):
        name, _, value = span.partition("=")
        if name in FIELDS and re.fullmatch(r'"[^"]*"|[\d.]+|True|False|None', value):
            RolloutConfig(**{name: ast.literal_eval(value)})


@current_page
def test_every_metric_on_a_page_is_logged(page):
    names = {metric.name for metric in (*METRICS, *HISTOGRAMS)}
    for span in inline(page):
        if re.fullmatch(r"rollout/\w+", span):
            assert span in names


@current_page
def test_every_dotted_name_on_a_page_resolves(page):
    for span in inline(page):
        if match := re.match(r"cb_rollout(\.\w+)+", span):
            assert resolves(match[0]), span


@current_page
def test_every_file_that_a_page_names_exists(page):
    for span in inline(page):
        if span.startswith(OWN_FOLDERS) and re.fullmatch(r"[\w./-]+", span):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_every_file_that_a_script_names_exists(script):
    for name in re.findall(
        r"(?<![\w./])(?:tests|recipes|scripts|docs)/[\w./-]*\w", script.read_text()
    ):
        assert (ROOT / name).exists(), name


def scripts_named_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w./-])scripts/[\w/]+\.(?:py|sh)\b", text))


@current_page
def test_every_script_that_a_page_tells_to_call_exists(page):
    missing = [x for x in scripts_named_in((ROOT / page).read_text()) if not (ROOT / x).is_file()]
    assert missing == []


@pytest.mark.parametrize("folder", ["cb_rollout", "scripts", "recipes", "tests"])
def test_every_script_that_a_docstring_or_comment_names_exists(folder):
    missing = [
        f"{path.relative_to(ROOT)}: {script}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for script in sorted(scripts_named_in(path.read_text()))
        if not (ROOT / script).is_file()
    ]
    assert missing == []


SCRIPTS = ROOT / "scripts"
ROOMS = sorted(path.parent for path in SCRIPTS.glob("*/__init__.py"))


def test_the_commands_of_a_contributor_are_in_the_guide():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    called = {path.relative_to(ROOT).as_posix() for path in SCRIPTS.glob("[!_]*.*")}
    folders = {f"`scripts/{room.name}/`" for room in ROOMS}
    assert called <= scripts_named_in(guide)
    assert {folder for folder in folders if folder not in guide} == set()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_folder_of_scripts_says_what_it_holds(room):
    assert docstring(room / "__init__.py")


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def commands_of_records() -> dict[str, list[str]]:
    """Return, for each record that the index links, the words of the command in its row."""
    commands = {}
    for line in (BENCHMARKS / "README.md").read_text().splitlines():
        row = re.match(r"\| `python ([^`]+)` \|", line)
        if row is None:
            continue
        for record in re.findall(r"\((\w+\.json)\)", line):
            commands[record] = row[1].split()
    return commands


@pytest.mark.parametrize("record", sorted(path.name for path in BENCHMARKS.glob("*.json")))
def test_the_index_names_the_script_that_writes_a_record(record):
    script, *arguments = commands_of_records()[record]
    if script == "scripts/bench.py":
        workload = arguments[0]
        assert workload in bench.WORKLOADS
        assert record.startswith(workload)
    else:
        assert f"docs/benchmarks/{record}" in docstring(ROOT / script)


def test_every_script_that_writes_a_record_is_in_the_index():
    writers = set()
    for path in SCRIPTS.rglob("*.py"):
        saves = re.search(r"import .*\bsave_record\b", path.read_text())
        if saves or re.search(r"docs/benchmarks/\w+\.json", docstring(path)):
            writers.add(path.relative_to(ROOT).as_posix())
    assert len(writers) >= 5
    assert writers <= {script for script, *_ in commands_of_records().values()}


@every_page
def test_every_relative_link_of_a_page_resolves(page):
    for target in linked_files((ROOT / page).read_text(), page):
        assert (ROOT / target).is_file(), target


@every_page
def test_a_list_follows_an_empty_line(page):
    # GitHub shows a list without one; the site shows a paragraph.
    for part, is_code in parts((ROOT / page).read_text()):
        if not is_code:
            assert not re.search(r"^(?![-*] |\d+\. |\s|$|#).*\n(?:- |1\. ).*", part, re.MULTILINE)


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [(DECISIONS, "0*.md"), (BENCHMARKS, "*.json")],
    ids=["decisions", "records"],
)
def test_an_index_links_every_page_of_its_folder(folder, pattern):
    index = posixpath.join(folder.relative_to(ROOT).as_posix(), "README.md")
    linked = set(linked_files((ROOT / index).read_text(), index))
    there = {path.relative_to(ROOT).as_posix() for path in folder.glob(pattern)}
    assert there
    assert there <= linked


def test_every_module_that_the_architecture_names_exists():
    for span in inline("docs/architecture.md"):
        if re.fullmatch(r"[\w/]+\.py", span):
            found = [path for path in (ROOT / "cb_rollout", ROOT) if (path / span).is_file()]
            # A row of the rooms names a file beside its folder.
            assert found or "/" not in span, span


def test_the_architecture_names_the_file_of_every_law():
    named = set(inline("docs/architecture.md"))
    files = (ROOT / "tests" / "invariants").glob("test_*.py")
    laws = {path.relative_to(ROOT).as_posix() for path in files}
    assert laws <= named, laws - named


def test_every_exit_code_of_every_command_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", COMMAND_LINE_HEADER, re.MULTILINE)
    assert sorted(rows) == sorted(subcommands())
    codes = re.findall(r"^\| (\d+) \|", COMMAND_LINE_HEADER, re.MULTILINE)
    assert codes == ["0", str(EXIT_PARTLY), str(EXIT_FAULT), str(EXIT_INTERRUPTED)]


def test_every_example_of_an_addition_is_run_by_a_test():
    headings = re.findall(r"^## (Add a.*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(headings) == 5
    assert [name for name in headings if f'block("{name}")' not in tests] == []


def test_the_readme_names_the_versions_that_an_installation_requires():
    wanted = re.findall(r'^ +"(torch|trl|transformers)>=([\d.]+)', PYPROJECT, re.MULTILINE)
    assert len(wanted) == 3
    readme = (ROOT / "README.md").read_text()
    assert [name for name, least in wanted if f"{name} >= {least}" not in readme] == []


def test_the_home_page_of_the_site_has_the_first_screen_of_the_readme():
    assert (ROOT / HOME).read_text().count(FIRST_SCREEN) == 1
    screen = first_screen()
    assert "cb_rollout.attach(trainer)" in screen
    assert "pip install" in screen
    assert not re.search(r"^#", "".join(p for p, is_code in parts(screen) if not is_code), re.M)


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_a_picture_is_what_the_script_draws(name):
    path = PICTURES / f"{name}.svg"
    assert path.read_text() == DRAWN[name](), "run python scripts/pages/pictures.py"
    assert path.relative_to(ROOT / DOCS).as_posix() in (ROOT / HOME).read_text()


TASKS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/tasks/*.md"))
ERRORS_PAGE = "docs/tasks/errors.md"


@functools.cache
def texts_of_the_package() -> list[str]:
    """Return every text in the package's source, with `...` in place of a run's values."""
    texts = []
    for path in (ROOT / "cb_rollout").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", None) for part in node.values)
                texts.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += [node.value, re.sub(r"\{\w*\}|%[sd]", "...", node.value)]
    return [" ".join(text.split()) for text in texts]


def rows_of_errors() -> list[str]:
    """Return the first cell of each row of the page of errors."""
    cells = re.findall(r"^\| (.+?) \| ", (ROOT / ERRORS_PAGE).read_text(), re.MULTILINE)
    return [cell for cell in cells if cell != "message"]


@pytest.mark.parametrize("cell", rows_of_errors())
def test_every_message_on_the_page_of_errors_is_in_the_source(cell):
    message = cell[1:-1]
    assert cell == f"`{message}`"
    assert any(message in text for text in texts_of_the_package())


def test_the_page_of_errors_explains_the_common_ones():
    assert len(set(rows_of_errors())) == len(rows_of_errors()) >= 60


@pytest.mark.parametrize("page", TASKS)
def test_the_page_of_a_task_is_in_the_index(page):
    assert page in set(linked_files((ROOT / "docs/tasks.md").read_text(), "docs/tasks.md"))


@pytest.mark.slow
def test_the_loop_of_a_task_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    documented.run(
        documented.block("Your own loop, with a reward of text", "docs/tasks/own_loop.md"),
        {
            "model": model.train(),
            "tokenizer": tokenizer,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batches": [(["ab", "abc", "b"], ["a", "b", "c"])] * 2,
            "reward": lambda text, answer: len(text.encode()) % 3,
        },
    )
    assert model.training
    after = model.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    recorded = read_metrics("runs/own_loop")
    assert [len(metrics.completion_lengths) for metrics in recorded] == [24, 24]
    drifts = [x.scalars["sampling/sampling_logp_difference/max"] for x in recorded]
    assert max(drifts) <= 1e-4


def test_the_table_of_costs_names_settings():
    assert set(COSTS) <= FIELDS
