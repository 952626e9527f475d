"""The laws of the house: its surface, its slim import, its layers, its sizes."""

import ast
import builtins
import dataclasses
import inspect
import math
import queue
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from nightly import kept_by_day

import cb_rollout
from cb_rollout import errors
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cb_rollout"
MODULES = sorted(PACKAGE.rglob("*.py"))
INSTRUMENTS = sorted((ROOT / "scripts" / "benchmarks").rglob("*.py"))

PUBLIC = [
    "AuditReport",
    "ConfigurationError",
    "ContinuousBatchingManager",
    "EngineDeadError",
    "FinishReason",
    "GenerationOutput",
    "IncompleteRolloutError",
    "InvalidRequestError",
    "LogprobDriftError",
    "MemoryPlan",
    "OutOfCacheMemoryError",
    "QueueFullError",
    "RequestStatus",
    "RolloutArguments",
    "RolloutConfig",
    "RolloutError",
    "RolloutGenerator",
    "SamplingParams",
    "SavedRollouts",
    "ScoredText",
    "SyncReport",
    "ToolTimeoutError",
    "WeightSyncError",
    "agent_reward",
    "attach",
    "audit",
    "audit_callback",
    "bitwise",
    "detach",
    "generate_batch",
    "install",
    "make_agent_rollout",
    "make_rollout_func",
    "packed_logprobs",
    "uninstall",
]

REFERENCE_FIELDS = [
    "block_size",
    "num_blocks",
    "max_batch_tokens",
    "max_memory_percent",
    "max_blocks_per_request",
    "allow_block_sharing",
    "use_async_batching",
    "use_cuda_graph",
    "q_padding_interval_size",
    "kv_padding_interval_size",
    "max_cached_graphs",
    "varlen_compile_config",
    "decode_compile_config",
    "use_default_compile_configs",
    "scheduler_type",
    "return_logprobs",
    "max_queue_size",
]
OWN_FIELDS = [
    "max_requests_per_batch",
    "seed",
    "weight_sync",
    "rollout_dtype",
    "logprobs_mode",
    "old_logps",
    "verify_every_steps",
    "verify_num_sequences",
    "max_logprob_drift",
    "release_cache",
    "training_reserve_gib",
]

SUBCOMMANDS = {
    "demo",
    "generate",
    "serve",
    "tinker",
    "bench",
    "report",
    "watch",
    "audit",
    "doctor",
    "env",
}

HOMELESS = {"utils", "common", "helpers", "misc"}
# Names of modules that own no noun.

# Of TRL a file for each of its trainers' ways.
HOMES_OF_FRAMEWORK = {
    "trl": {"integrations/trl/upstream.py", "integrations/async_grpo/upstream.py"},
    "wandb": {"metrics/wandb.py"},
    "opentelemetry": {
        f"integrations/otel/{name}.py"
        for name in ("delivery", "exporters", "instruments", "observer")
    },
}
ONE_FILE_FRAMEWORKS = {"peft", "deepspeed", "fastapi"}


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def run_command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        "import sys; from cb_rollout.tools.cli import main; sys.exit(main())", *arguments
    )


def imported_packages(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def importers(package: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if package in set(imported_packages(path))
    }


def test_the_public_surface_is_pinned():
    assert cb_rollout.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_loads(name):
    assert getattr(cb_rollout, name).__name__ == name
    assert name in dir(cb_rollout)


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'cb_rollout' has no attribute 'RollOutConfig'"):
        cb_rollout.RollOutConfig  # noqa: B018 - reading it is the test


@pytest.mark.parametrize(
    "statement",
    [
        "import cb_rollout",
        "import cb_rollout.config.rollout",
        "from cb_rollout import RolloutConfig, SamplingParams, GenerationOutput, RolloutError",
    ],
)
def test_the_slim_import_loads_no_framework(statement):
    heavy = "{'torch', 'transformers', 'trl', 'accelerate', 'peft', 'wandb', 'numpy'}"
    done = run_python(f"import sys; {statement}; print(*sorted({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_every_error_is_a_rollout_error_and_public():
    defined = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined
    assert all(issubclass(value, errors.RolloutError) for value in defined.values())
    assert set(defined) <= set(cb_rollout.__all__)


def test_the_error_tree_in_the_docstring_is_the_error_tree():
    drawn = dict(re.findall(r"\+-- (\w+) +\(([\w.]+)\)", errors.__doc__))
    children = {child.__name__: child for child in errors.RolloutError.__subclasses__()}
    assert set(drawn) == set(children)
    for name, standard in drawn.items():
        expected = queue.Full if standard == "queue.Full" else getattr(builtins, standard)
        assert children[name].__bases__ == (errors.RolloutError, expected)


def test_the_config_has_every_field_of_the_contract():
    names = {field.name for field in dataclasses.fields(RolloutConfig)}
    assert set(REFERENCE_FIELDS) <= names
    assert set(OWN_FIELDS) <= names


FIELDS = [*dataclasses.fields(RolloutConfig), *dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_setting_has_a_help_text(field):
    assert field.metadata["help"].endswith(".")


def test_the_console_script_is_the_command_line():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"cb-rollout": "cb_rollout.tools.cli:main"}


def test_the_help_of_the_command_line_and_of_each_subcommand_is_printed():
    top = run_command_line("--help")
    assert top.returncode == 0, top.stderr
    subcommands = set(re.findall(r"^    (\w+) {2,}\w", top.stdout, re.MULTILINE))
    assert subcommands == SUBCOMMANDS
    for subcommand in subcommands:
        done = run_command_line(subcommand, "--help")
        assert done.returncode == 0, done.stderr
        assert f"cb-rollout {subcommand}" in done.stdout


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_names_a_noun_and_is_ascii(path):
    text = path.read_text()
    assert path.stem not in HOMELESS
    assert text.isascii()


MAX_FOLDER_ENTRIES = 14
MAX_FUNCTION_LINES = 60

HEADLESS = ("What", "Who", "Whose", "Which", "Whether", "Where", "How", "When")


def definitions(path: Path, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=str)
def test_a_folder_holds_about_a_dozen_entries(folder):
    uncounted = {"__pycache__", "__init__.py", "py.typed"}
    entries = [entry for entry in folder.iterdir() if entry.name not in uncounted]
    assert len(entries) <= MAX_FOLDER_ENTRIES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    return lines - (function.body[0].end_lineno - function.body[0].lineno + 1)


def test_a_function_has_at_most_sixty_lines():
    long = [
        f"{path.relative_to(ROOT)}:{node.name}: {num_lines(node)}"
        for path in (*MODULES, *INSTRUMENTS)
        # A Triton kernel is one function.
        if path.stem not in ("kernels", "sampling_kernels")
        for node in definitions(path, ast.FunctionDef, ast.AsyncFunctionDef)
        if num_lines(node) > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_no_two_public_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_docstring_names_the_thing_first():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    headless = [
        f"{path.relative_to(ROOT)}: {docstring.splitlines()[0]}"
        for path in (*MODULES, *INSTRUMENTS)
        for node in definitions(path, *kinds)
        if (docstring := ast.get_docstring(node)) and docstring.split()[0] in HEADLESS
    ]
    assert headless == []


def test_a_comment_stands_above_what_it_explains():
    below = []
    for path in (*MODULES, *INSTRUMENTS):
        lines = path.read_text().splitlines()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.end_lineno < len(lines):
                after = lines[node.end_lineno]
                next_line = next((x for x in lines[node.end_lineno :] if x[:1] != "#"), "")
                if after.startswith("# ") and not next_line:
                    below.append(f"{path.relative_to(ROOT)}:{node.end_lineno + 1}: {after}")
    assert below == []


def test_a_zip_of_unequal_lengths_says_why():
    # ruff asks for a strict= at each; a value of other rows beside one's own would be cut silently.
    unexplained = []
    for path in MODULES:
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            is_zip = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip"
            if not is_zip or any(ast.unparse(k) == "strict=True" for k in node.keywords):
                continue
            if not lines[node.lineno - 2].lstrip().startswith("# "):
                unexplained.append(f"{path.name}:{node.lineno}")
    assert not unexplained


@pytest.mark.parametrize(("framework", "homes"), HOMES_OF_FRAMEWORK.items())
def test_a_framework_is_imported_in_its_homes_only(framework, homes):
    assert importers(framework) <= homes


@pytest.mark.parametrize("framework", sorted(ONE_FILE_FRAMEWORKS))
def test_a_foreign_framework_is_imported_in_one_place(framework):
    assert len(importers(framework)) <= 1


@pytest.mark.parametrize("folder", [PACKAGE, PACKAGE / "engine"], ids=["package", "engine"])
def test_the_architecture_has_a_row_for_every_room_and_module(folder):
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    rooms = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    named = set(re.findall(r"^\| `([\w/]+)` \|", text, re.MULTILINE))
    assert rooms | modules <= named


def test_the_type_marker_is_shipped():
    assert (PACKAGE / "py.typed").read_text() == ""


def test_the_documents_are_what_code_and_measurements_say():
    command = [sys.executable, str(ROOT / "scripts" / "write_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout}run python scripts/write_docs.py"


def test_the_commit_hooks_are_the_checks_of_the_script():
    script = (ROOT / "scripts" / "check.sh").read_text()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    checks = {f".venv/bin/{check}" for check in re.findall(r"^check (.+)$", script, re.MULTILINE)}
    checks |= set(re.findall(r"^bash scripts/\S+", script, re.MULTILINE))
    assert {hook["entry"] for hook in hooks} == checks


def test_the_workflow_runs_what_a_contributor_runs():
    script = (ROOT / ".ci" / "run").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    run_here = re.findall(r'"\$root/(scripts/\S+)"( -m ".+")?', script)
    assert len(run_here) == 3
    assert all(f"{path}{tests}" in commands for path, tests in run_here)


@pytest.mark.parametrize("num_cases", range(60))
def test_ci_runs_the_square_root_of_a_tests_slow_cases(num_cases):
    kept = kept_by_day(num_cases)
    assert kept <= set(range(num_cases))
    assert len(kept) == min(num_cases, max(2, math.ceil(math.sqrt(num_cases))))
    if num_cases:
        assert {0, num_cases - 1} <= kept


def test_only_the_service_reaches_into_a_manager_its_engine_and_its_loop():
    inside = re.compile(r"manager\._|manager\.(loop|engine|pauses)\._")
    service = PACKAGE / "engine" / "service"
    reaching = [
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if service not in path.parents
        and inside.search(re.sub(r"cb_rollout\.engine\S*", "", path.read_text()))
    ]
    assert reaching == []
