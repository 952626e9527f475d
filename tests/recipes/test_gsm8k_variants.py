"""Each GSM8K variant is the one before it plus one feature, and runs on two processes."""

import difflib
import json

import pytest
import yaml
from launching import RECIPES, write_questions
from processes import run_processes
from tiny import save_checkpoint

# A feature, its sentence in the header, and the output directory.
MOST_CHANGED_LINES = 16


def read(name):
    return yaml.safe_load((RECIPES / "accelerate" / f"{name}.yaml").read_text())


def test_the_lora_recipe_is_the_plain_one_and_a_few_lines():
    plain, lora = (
        (RECIPES / f"{name}.py").read_text().splitlines() for name in ("gsm8k_grpo", "gsm8k_lora")
    )
    changes = [line for line in difflib.ndiff(plain, lora) if line.startswith("+ ")]
    assert any("peft_config=LoraConfig" in line for line in changes)
    assert len(changes) <= MOST_CHANGED_LINES


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [("fsdp2", "FSDP", "fsdp_config"), ("zero3", "DEEPSPEED", "deepspeed_config")],
)
def test_sharding_is_one_section_beside_ddp(name, kind, settings):
    config = read(name)
    assert config.pop(settings)
    assert config == read("ddp") | {"distributed_type": kind}


def test_hsdp_is_fsdp2_on_two_machines():
    config, fsdp2 = read("hsdp"), read("fsdp2")
    sizes = config.pop("parallelism_config")
    assert sizes["parallelism_config_dp_replicate_size"] == config["num_machines"] == 2
    assert sizes["parallelism_config_dp_shard_size"] == fsdp2["num_processes"]
    two = {"num_machines": 2, "num_processes": 16, "main_process_port": 29500}
    assert config == fsdp2 | two


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    write_questions(folder / "train.jsonl")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        ("gsm8k_grpo", "ddp"),
        ("gsm8k_lora", "ddp"),
        ("gsm8k_lora", "fsdp2"),
        ("gsm8k_lora", "zero3"),
    ],
)
def test_two_steps_on_two_processes(checkpoint, tmp_path, recipe, config):
    if config == "zero3":
        pytest.importorskip("deepspeed", reason="ZeRO is tested where deepspeed is installed")
    run_processes(
        "recipes/on_cpu.py",
        *(str(RECIPES / "accelerate" / f"{config}.yaml"), str(RECIPES / f"{recipe}.py")),
        *("--model", str(checkpoint), "--dataset", str(checkpoint / "train.jsonl")),
        *("--output-dir", str(tmp_path), "--max-steps", "2", "--batch-size", "8"),
        *("--num-generations", "4", "--max-completion-length", "16"),
    )
    written = (tmp_path / "cb_rollout" / "metrics.jsonl").read_text()
    steps = [json.loads(row) for row in written.splitlines()]
    assert [step["step"] for step in steps if "reward" in step["scalars"]] == [1, 2]
    drifts = [s["scalars"].get("sampling/sampling_logp_difference/max", 0.0) for s in steps]
    assert max(drifts) <= 1e-5
    saved = "adapter_model.safetensors" if recipe == "gsm8k_lora" else "model.safetensors"
    assert (tmp_path / saved).exists()


@pytest.mark.slow
def test_two_steps_on_two_machines_of_two_processes(checkpoint, tmp_path):
    config = read("hsdp") | {"num_processes": 4, "main_process_port": 0, "machine_rank": 1}
    config["parallelism_config"]["parallelism_config_dp_shard_size"] = 2
    file = tmp_path / "hsdp.yaml"
    file.write_text(yaml.safe_dump(config))
    ranks = run_processes(
        "recipes/on_cpu.py",
        *(str(file), str(RECIPES / "gsm8k_lora.py")),
        *("--model", str(checkpoint), "--dataset", str(checkpoint / "train.jsonl")),
        *("--output-dir", str(tmp_path), "--max-steps", "2", "--batch-size", "4"),
        *("--num-generations", "4", "--max-completion-length", "16"),
        num_processes=4,
        num_machines=2,
    )
    # Shards within a machine, replicas across.
    assert [rank["mesh"] for rank in ranks] == [{"dp_replicate": 2, "dp_shard": 2}] * 4
    written = (tmp_path / "cb_rollout" / "metrics.jsonl").read_text()
    steps = [json.loads(row) for row in written.splitlines()]
    assert [step["step"] for step in steps if "reward" in step["scalars"]] == [1, 2]
    drifts = [s["scalars"].get("sampling/sampling_logp_difference/max", 0.0) for s in steps]
    assert max(drifts) <= 1e-5
