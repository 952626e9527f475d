"""Faults planted in the C++ kernels end a child process, never this one, and PyTorch computes.

`pytest -s` prints where each fault ends.
"""

import logging
from dataclasses import replace

import pytest
import torch
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention.cpu import linear
from cb_rollout.engine.numerics import kernels
from cb_rollout.engine.numerics.qualification import qualifier, verdicts
from cb_rollout.engine.numerics.qualification.qualifier import UnprovedError

# The last prompt has more keys than a tile.
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [20] * 17, list(range(3, 60))]

# The first statement of each kernel.
MULTIPLY = "const std::vector<Operand> given = operands_of(rows, num_rows, num_inputs);"
MULTIPLY_MANY = "const Products& products = *given;"
ATTEND = "if (step.num_rows == 0) return;"
OF_OUTPUT = "const int64_t num_parts = wanted < NUM_KEY_HEADS ? wanted : NUM_KEY_HEADS;"

# (kernel, name of the fault): (text of the source, text in its place, what the verdict says).
FAULTS = {
    ("multiply", "wrong by a hundredth"): (
        "store(numbers[o] + bias,",
        "store(numbers[o] * REAL(1.01) + bias,",
        "computes numbers that are off by",
    ),
    ("multiply", "wrong beyond the first rows"): (
        "const Operand numbers = given[r * row_size",
        "const Operand numbers = given[(r + row > 6 ? 0 : r) * row_size",
        "computes numbers that are off by",
    ),
    ("multiply", "raises"): (MULTIPLY, f"throw 1; {MULTIPLY}", "was killed by SIGABRT"),
    ("multiply", "ends the process"): (
        MULTIPLY,
        f"std::_Exit(0); {MULTIPLY}",
        "ended the process with code 0",
    ),
    ("multiply", "writes to null"): (
        MULTIPLY,
        f"*(volatile int*)nullptr = 1; {MULTIPLY}",
        "was killed by SIGSEGV",
    ),
    ("multiply", "reads past the weight"): (
        MULTIPLY,
        "static volatile char read; "
        f"read = *(const volatile char*)(weight + num_inputs * num_outputs); {MULTIPLY}",
        "was killed by SIGSEGV",
    ),
    ("multiply", "writes before its outputs"): (
        MULTIPLY,
        f"((volatile char*)outputs)[-1] = 1; {MULTIPLY}",
        "writes before the first number of an array",
    ),
    ("multiply", "divides by zero"): (
        MULTIPLY,
        f"volatile int64_t zero = 0; zero = num_rows / zero; {MULTIPLY}",
        "was killed by SIGFPE",
    ),
    ("multiply", "hangs"): (
        MULTIPLY,
        f"for (volatile bool waits = true; waits;) {{}} {MULTIPLY}",
        "did not end within",
    ),
    ("multiply_many", "wrong by a hundredth"): (
        "return fused(filled(weight), rows, sum);",
        "return fused(filled(weight * REAL(1.01)), rows, sum);",
        "computes numbers that are off by",
    ),
    ("multiply_many", "wrong in the second group of rows"): (
        "return reinterpret_cast<const Numbers*>(vectors.data() + group.first * num_steps);",
        "return reinterpret_cast<const Numbers*>(vectors.data());",
        "computes numbers that are off by",
    ),
    ("multiply_many", "wrong in the second weight"): (
        "while (first_blocks[i] > item) i--;",
        "i = 0;",
        "computes numbers that are off by",
    ),
    ("multiply_many", "leaves the last inputs out"): (
        "for (; step < num_steps; step++) {",
        "for (; false; step++) {",
        "computes numbers that are off by",
    ),
    ("multiply_many", "writes to null"): (
        MULTIPLY_MANY,
        f"*(volatile int*)nullptr = 1; {MULTIPLY_MANY}",
        "was killed by SIGSEGV",
    ),
    ("multiply_many", "hangs"): (
        MULTIPLY_MANY,
        f"for (volatile bool waits = true; waits;) {{}} {MULTIPLY_MANY}",
        "did not end within",
    ),
    ("attend", "wrong by a hundredth"): (
        "REAL share = 1 / total;",
        "REAL share = REAL(1.01) / total;",
        "computes numbers that are off by",
    ),
    # No row of the model check is so long.
    ("attend", "wrong beyond a tile of keys"): (
        "for (int64_t index = 0; start < length; start += TILE_KEYS, index ^= 1) {",
        "for (int64_t index = 0; start < length; start += TILE_KEYS) {",
        "computes numbers that are off by",
    ),
    ("attend", "wrong with sinks alone"): (
        "const REAL sink = real(step.sinks[query_head]);",
        "const REAL sink = real(step.sinks[0]);",
        "computes numbers that are off by",
    ),
    ("attend", "writes keys into another slot"): (
        "const int64_t slot = slot_of(row, lengths[row] - 1);",
        "const int64_t slot = slot_of(row, lengths[row] > 9 ? 0 : lengths[row] - 1);",
        "writes wrong keys or values, or in a wrong place",
    ),
    ("attend", "leaves outputs as they are"): (
        ATTEND,
        "if (step.lengths[0] != 5) return;",
        "writes wrong keys or values, or in a wrong place",
    ),
    ("attend", "raises"): (ATTEND, f"throw 1; {ATTEND}", "was killed by SIGABRT"),
    ("attend", "writes to null"): (
        ATTEND,
        f"*(volatile int*)nullptr = 1; {ATTEND}",
        "was killed by SIGSEGV",
    ),
    ("attend", "writes past its outputs"): (
        OF_OUTPUT,
        f"{OF_OUTPUT} step.outputs[step.num_rows * NUM_HEADS * VALUE_SIZE] = step.outputs[0];",
        "was killed by SIGSEGV",
    ),
    ("attend", "hangs"): (
        ATTEND,
        f"for (volatile bool waits = true; waits;) {{}} {ATTEND}",
        "did not end within",
    ),
}


@pytest.fixture
def unloaded(tmp_path, monkeypatch):
    """No kernel is loaded, before and after a test, and no verdict is known."""
    monkeypatch.setattr(verdicts, "cache_folder", lambda name: tmp_path)
    monkeypatch.delenv(qualifier.SWITCH, raising=False)
    unload()
    yield
    unload()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    print(f"\n{'kernel':<9} {'planted fault':<30} where it ends")  # noqa: T201
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture
def planted(libraries, unloaded, monkeypatch):
    """Kernels are compiled into a folder of this module: faulty ones are left to nobody."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(libraries))


def unload():
    kernels.kernel.cache_clear()
    linear.has_kernel.cache_clear()
    qualifier.forget_trials()
    kernels._PROOFS.clear()


def plant(fault, monkeypatch):
    """Plant a fault in each source of its kernel; return what the verdict says."""
    right, wrong, told = FAULTS[fault]
    source_of = kernels.source_of

    def with_fault(name, dtype, sizes):
        source = source_of(name, dtype, sizes)
        if name != fault[0]:
            return source
        assert source.count(right) == 1
        return source.replace(right, wrong)

    monkeypatch.setattr(kernels, "source_of", with_fault)
    if "hangs" in fault:
        monkeypatch.setattr(kernels, "SECONDS_OF_A_TRIAL", 5)
    return told


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def roll_out(generator, model):
    """Sample, and hold every log-probability against a plain forward."""
    params = SamplingParams(ignore_eos=True)
    outputs = generator.generate_batch(PROMPTS, sampling_params=params, max_new_tokens=12)
    for output, prompt in zip(outputs.values(), PROMPTS, strict=True):
        plain = plain_logprobs(model, prompt, output.generated_tokens, 1.0)
        assert output.logprobs == pytest.approx(plain, abs=1e-5)
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize("fault", FAULTS, ids=" ".join)
@pytest.mark.slow
@pytest.mark.usefixtures("planted")
def test_a_fault_of_a_kernel_ends_on_a_lower_rung_with_one_line(fault, monkeypatch, caplog):
    told = plant(fault, monkeypatch)
    line = check_lower_rung(fault[0], told, caplog)
    print(f"{fault[0]:<9} {fault[1]:<30} {line}")  # noqa: T201


def check_lower_rung(kernel, told, caplog):
    """Train and roll out with a kernel that fails its trial; return the one warning."""
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        roll_out(generator, model)
        # Training goes on, and so do rollouts.
        loss = model(torch.tensor([PROMPTS[-1]]), labels=torch.tensor([PROMPTS[-1]])).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        generator.sync_weights()
        roll_out(generator, model)
        attention = next(path for path in generator.paths if path.part == "decode attention")
    (line,) = warnings_of(caplog)
    assert f"C++ kernel {kernel} (" in line
    assert told in line
    assert "PyTorch computes in its place" in line
    assert "doctor MODEL --qualify" in line
    if kernel == "attend":
        assert attention.runs == "gathered"
        assert told in attention.obstacle
    else:
        assert attention.runs.startswith("cpp")
        assert attention.proof.startswith("proved in a process of its own")
        assert not linear.has_kernel(torch.float32, kernel)
    return line


# Functions of `planted_trials`, and what the verdict says.
TRIALS = {
    "wrong": "off by 2",
    "raises": "raised ArithmeticError: nothing",
    "hangs": "did not end within",
    "hangs_in_c": "did not end within",
    "segfaults": "was killed by SIGSEGV",
    "aborts": "was killed by SIGABRT",
    "exits": "ended the process with code 0",
    "prints_and_segfaults": "was killed by SIGSEGV",
}


def plant_trial(trial, kernel, monkeypatch):
    """Have a child run this function of `planted_trials` in place of a kernel's trial."""
    subject_of = kernels._subject

    def subject(name, *rest):
        subject = subject_of(name, *rest)
        if name != kernel:
            return subject
        limit = 2 if "hangs" in trial else subject.limit_seconds
        return replace(subject, function=f"planted_trials:{trial}", limit_seconds=limit)

    monkeypatch.setattr(kernels, "_subject", subject)


@pytest.mark.parametrize("kernel", ["multiply", "multiply_many", "attend"])
@pytest.mark.parametrize("trial", ["segfaults", "hangs_in_c"])
@pytest.mark.usefixtures("unloaded")
def test_a_failed_trial_ends_on_a_lower_rung_with_one_line(trial, kernel, monkeypatch, caplog):
    plant_trial(trial, kernel, monkeypatch)
    check_lower_rung(kernel, TRIALS[trial], caplog)


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.usefixtures("unloaded")
def test_a_kernel_whose_trial_fails_is_not_loaded(trial, monkeypatch, caplog):
    plant_trial(trial, "multiply", monkeypatch)
    with pytest.raises(UnprovedError, match=TRIALS[trial]):
        kernels.kernel("multiply", torch.float32)
    assert not linear.has_kernel(torch.float32)
    (line,) = warnings_of(caplog)
    assert TRIALS[trial] in line


@pytest.mark.usefixtures("planted")
def test_a_failed_trial_is_not_made_again_by_the_next_process(monkeypatch, caplog):
    plant(("multiply", "raises"), monkeypatch)
    with pytest.raises(UnprovedError, match="SIGABRT"):
        kernels.kernel("multiply", torch.float32)
    # As another process, which starts no child.
    unload()
    monkeypatch.setattr(qualifier, "run_in_child", None)
    with pytest.raises(UnprovedError, match=r"SIGABRT in a process of its own \(.*, stored\)"):
        kernels.kernel("multiply", torch.float32)
    assert len(warnings_of(caplog)) == 2


@pytest.mark.usefixtures("unloaded")
def test_bitwise_numerics_are_refused_where_their_kernel_fails_its_trial(monkeypatch):
    monkeypatch.setattr(kernels, "TRIAL", "planted_trials:aborts")
    config = RolloutConfig(numerics="bitwise")
    with pytest.raises(ConfigurationError, match=r"SIGABRT.*leave numerics at 'fast'"):
        RolloutGenerator(tiny_model("qwen3"), config)


@pytest.mark.usefixtures("unloaded")
def test_without_a_child_process_no_kernel_is_loaded(monkeypatch, caplog):
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        roll_out(generator, model)
    # The kernels are compiled now. The compiler is called through Python too.
    unload()
    for verdict in verdicts.VerdictStore().folder.glob("*.json"):
        verdict.unlink()
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        roll_out(generator, model)
        attention = next(path for path in generator.paths if path.part == "decode attention")
        assert "no process can be started" in attention.obstacle
    # A line for each kernel, though more sequences ask for it.
    lines = warnings_of(caplog)
    assert len(lines) == len(set(lines)) == 3
    assert all("could not be tried" in line for line in lines)
    assert all("doctor MODEL --qualify" in line for line in lines)
    assert not list(verdicts.VerdictStore().folder.glob("*.json"))


@pytest.mark.usefixtures("unloaded")
def test_the_switch_loads_kernels_without_a_trial(monkeypatch):
    monkeypatch.setenv(qualifier.SWITCH, "0")
    monkeypatch.setattr(qualifier, "run_in_child", None)
    kernels.kernel("multiply", torch.float32)
    assert qualifier.trials() == []


TRIED = ["multiply", "multiply_many", "multiply_batch", "attend_masked", "attend_paged"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRIED)
@pytest.mark.usefixtures("unloaded")
def test_every_kernel_passes_its_trial(name, dtype):
    kernels.kernel(name, dtype)
    assert kernels.proof_of(name, dtype).fault == ""
