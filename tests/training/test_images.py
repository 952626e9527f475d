"""A stock trainer of a vision-language model rolls out attached, on prompts with images."""

import pytest
import torch
from datasets import Dataset, Image
from peft import LoraConfig
from playback import assert_learned_alike, play_back, watched
from tiny_trainer import in_own_names, logged
from tiny_vision import picture, tiny_vision_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.trl.images import image_arguments
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.metrics.run_records import find_run_dir, read_image, read_rollouts
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 2, 4

DEFAULTS = {
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": NUM_PROMPTS * NUM_GENERATIONS,
    "num_generations": NUM_GENERATIONS,
    "max_completion_length": 6,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
    "beta": 0.0,
}
# Of TRL's own tests of vision models. Their rate makes rounding as large as weights in one step.
TRLS_TESTS = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "max_steps": 1,
}
LORA = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)", task_type="CAUSAL_LM")
CHECKED = {"old_logps": "trainer", "verify_every_steps": 1, "max_logprob_drift": 1e-5}

# That the loss is not packed is said.
pytestmark = pytest.mark.filterwarnings("ignore:loss_forward='packed' is switched off")


def share_of_low_ids(completions, **_):
    return [sum(word in text for word in ("w20", "w21", "w30")) for text in map(str, completions)]


def rows(columns):
    asked = [{"role": "user", "content": "w60 w61"}]
    found = {
        "image": [{"prompt": asked, "image": picture(i, (30 + 8 * i, 40))} for i in range(4)],
        "images": [
            {"prompt": asked, "images": [picture(i), picture(i + 1)][: 1 + i % 2]} for i in range(4)
        ],
    }[columns]
    dataset = Dataset.from_list(found)
    return dataset.cast_column("image", Image()) if columns == "image" else dataset


def vision_trainer(
    tmp_path,
    model_type="qwen2_5_vl",
    columns="image",
    is_rloo=False,
    is_tower_frozen=False,
    num_rows=4,
    peft_config=None,
    **settings,
):
    model, processor = tiny_vision_model(model_type)
    if is_tower_frozen:
        model.model.visual.requires_grad_(False)
    # As TRL loads it.
    processor.tokenizer.padding_side = "left"
    trainer_class, config_class = (
        (RLOOTrainer, RLOOConfig) if is_rloo else (GRPOTrainer, GRPOConfig)
    )
    return trainer_class(
        model=model,
        reward_funcs=share_of_low_ids,
        args=config_class(
            **{"output_dir": str(tmp_path)} | in_own_names(config_class, DEFAULTS) | settings
        ),
        processing_class=processor,
        train_dataset=rows(columns).select(range(num_rows)),
        peft_config=peft_config,
    )


@pytest.mark.parametrize(
    ("model_type", "columns", "is_rloo"),
    [
        ("qwen2_5_vl", "image", False),
        ("gemma3", "image", False),
        ("llava", "image", True),
        ("qwen2_5_vl", "images", False),
    ],
)
def test_sampled_log_probabilities_are_those_of_the_trainers_own_forward(
    tmp_path, model_type, columns, is_rloo
):
    trainer = vision_trainer(tmp_path, model_type, columns, is_rloo)
    generator = attach(trainer)
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS
    assert generator.policy_version >= 1
    (drift,) = {max(logged(trainer, "rollout/logprob_drift_max"))}
    assert drift <= 1e-5
    if not is_rloo:
        differences = logged(trainer, "sampling/sampling_logp_difference/max")
        assert len(differences) == NUM_STEPS
        assert max(differences) <= 1e-5
    assert max(logged(trainer, "completions/max_length")) > 1
    # Beside the tokens, the records have each picture, and one token for each.
    records = read_rollouts(tmp_path)
    assert records
    for record in records:
        assert 1 <= len(record.images) <= (2 if columns == "images" else 1)
        assert record.prompt.count(trainer.processing_class.image_token) == len(record.images)
        for name in record.images:
            assert read_image(find_run_dir(tmp_path), name).startswith(b"\x89PNG")


def test_a_repeated_prompt_is_encoded_once(tmp_path, monkeypatch):
    trainer = vision_trainer(tmp_path)
    generator = attach(trainer)
    processor, calls = trainer.processing_class, []
    own = type(processor).__call__
    monkeypatch.setattr(
        type(processor), "__call__", lambda self, *a, **k: calls.append(1) or own(self, *a, **k)
    )
    first, second = (picture(seed) for seed in (1, 2))
    text = f"w60 {processor.image_token} w61"
    ids = processor(text=[text], images=[first])["input_ids"][0]
    calls.clear()
    images = [[first], [picture(1)], [second], [second]]
    prompts, completions, _, _ = trainer.vllm_generation.generate([ids] * 4, images, 2)
    assert len(calls) == 2
    assert prompts == [ids] * 4
    assert len(completions) == 4
    generator.close()


@pytest.mark.parametrize(
    ("model_type", "columns", "settings"),
    [
        ("qwen2_5_vl", "image", {}),
        ("qwen2_5_vl", "images", {"beta": 0.1, "peft_config": LORA}),
        pytest.param("gemma3", "image", {}, marks=pytest.mark.slow),
        pytest.param("llava", "image", {}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "image", {"is_rloo": True}, marks=pytest.mark.slow),
        pytest.param(
            "qwen2_5_vl",
            "images",
            {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trls_own_settings_learn_what_trls_path_learns(tmp_path, model_type, columns, settings):
    """From the same tokens: losses and gradients."""
    settings = TRLS_TESTS | settings
    trainer = vision_trainer(tmp_path / "ours", model_type, columns, **settings)
    attach(trainer, RolloutConfig(old_logps="trainer"))
    ours = watched(trainer)
    trainer.train()
    other = vision_trainer(tmp_path / "theirs", model_type, columns, **settings)
    theirs = play_back(other, ours.turns)
    other.train()
    assert_learned_alike(ours, theirs)


@pytest.mark.parametrize(
    ("part", "weight_sync"),
    [
        ("whole", "shared"),
        ("frozen tower", "copy"),
        pytest.param("whole", "copy", marks=pytest.mark.slow),
        pytest.param("frozen tower", "shared", marks=pytest.mark.slow),
        pytest.param("lora", "shared", marks=pytest.mark.slow),
        pytest.param("lora", "copy", marks=pytest.mark.slow),
    ],
)
def test_every_trained_part_is_rolled_out_from_in_the_next_step(tmp_path, part, weight_sync):
    """The pictures of every step are the same, so that kept features would be read."""
    trainer = vision_trainer(
        tmp_path,
        is_tower_frozen=part == "frozen tower",
        peft_config=LORA if part == "lora" else None,
        num_rows=NUM_PROMPTS,
        learning_rate=1e-2,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    generator = attach(
        trainer, RolloutConfig(weight_sync=weight_sync, verify_weight_sync=True, **CHECKED)
    )
    trainer.train()
    after = dict(trainer.model.named_parameters())
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert any("visual" in name for name in changed) is (part == "whole")
    assert any("language_model" in name for name in changed)
    assert all("lora_" in name for name in changed) is (part == "lora")
    assert generator.policy_version == NUM_STEPS
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert len(logged(trainer, "rollout/logprob_drift_max")) == NUM_STEPS
    encoded = logged(trainer, "rollout/images_encoded")
    # The first prompt of all is checked by plain forwards, and its features are kept.
    assert encoded[-1] == NUM_PROMPTS
    generator.close()


@pytest.mark.parametrize("is_adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_copy_in_bfloat16_reads_images(tmp_path, is_adapted):
    trainer = vision_trainer(tmp_path, bf16=True, peft_config=LORA if is_adapted else None)
    generator = attach(trainer, RolloutConfig(old_logps="trainer"))
    trainer.train()
    assert generator.manager.model is not generator.manager._engine.trained
    assert generator.manager.model.model.visual.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()


def test_evaluation_samples_from_the_engine_on_its_own_images(tmp_path):
    trainer = vision_trainer(tmp_path, columns="images", per_device_eval_batch_size=4)
    generator = attach(trainer, RolloutConfig(verify_every_steps=1, max_logprob_drift=1e-5))
    figures = trainer.evaluate(rows("images"))
    assert figures["eval_sampling/sampling_logp_difference/max"] < 1e-5
    records = read_rollouts(tmp_path)
    assert {record.mode for record in records} == {"eval"}
    assert {len(record.images) for record in records} <= {1, 2}
    generator.close()


def test_some_rows_of_a_batch_are_verified_on_their_own_images(tmp_path):
    trainer = vision_trainer(tmp_path, "qwen2_5_vl", "images", learning_rate=1e-2)
    config = {"verify_every_steps": 1, "verify_num_sequences": 3, "max_logprob_drift": 1e-5}
    attach(trainer, RolloutConfig(on_logprob_drift="raise", old_logps="rollout", **config))
    trainer.train()
    assert len(logged(trainer, "rollout/logprob_drift_max")) == NUM_STEPS


@pytest.mark.parametrize(
    ("strategy", "columns"),
    [
        (DynamicSampling(max_dropped_groups=4), "images"),
        (PartialRollouts(num_extra_groups=1), "image"),
        pytest.param(OverSampling(num_extra_groups=1), "images", marks=pytest.mark.slow),
        pytest.param(DynamicSampling(max_dropped_groups=4), "image", marks=pytest.mark.slow),
    ],
)
def test_a_strategy_chooses_rows_with_their_images(tmp_path, strategy, columns):
    trainer = vision_trainer(tmp_path, columns=columns)
    attach(trainer)
    use_strategy(trainer, strategy)
    compute_loss, differences = trainer.compute_loss, []

    def checked(model, inputs, *rest, **named):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        forward = type(trainer)._get_per_token_logps_and_entropies
        with torch.no_grad():
            found, *_ = forward(trainer, model, ids, mask, width, **image_arguments(inputs))
        found = found * inputs["completion_mask"]
        if not differences:
            # Later steps of a strategy that carries have tokens of older policies.
            differences.append((found - inputs["sampling_per_token_logps"]).abs().max())
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = checked
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS
    assert differences[0] <= 1e-5
    trainer.vllm_generation.close()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "gemma3", "llava"])
def test_with_bitwise_numerics_no_log_probability_has_a_difference(tmp_path, model_type):
    trainer = vision_trainer(tmp_path, model_type)
    attach(trainer, RolloutConfig(numerics="bitwise", old_logps="trainer", loss_forward="trainer"))
    trainer.train()
    detach(trainer)
    assert logged(trainer, "sampling/sampling_logp_difference/max") == [0.0, 0.0]
