"""A stock trainer of a vision-language model rolls out attached, on prompts with images."""

import re

import pytest
import torch
import trl.trainer.grpo_trainer as grpo
from images import create, prompt
from peft import LoraConfig
from playback import TOOLS, assert_learned_alike, play_back, watched
from tiny_trainer import logged
from tiny_vision import CHAT_TEMPLATE, picture
from tiny_vision_trainer import NUM_PROMPTS, NUM_STEPS, rows, vision_trainer

from cb_rollout import LogprobDriftError, RolloutConfig, attach, detach
from cb_rollout.integrations.trl import packed_loss
from cb_rollout.integrations.trl.images import image_arguments
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.metrics.run_records import find_run_dir, iterate_rollouts, read_image
from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts

# Of TRL's own tests of vision models. Their rate makes rounding as large as weights in one step.
TRLS_TESTS = {
    "learning_rate": 0.1,
    "per_device_train_batch_size": 3,
    "num_generations": 3,
    "max_completion_length": 8,
    "max_steps": 1,
}
LORA = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)", task_type="CAUSAL_LM")
TWO_GROUPS = {"per_device_train_batch_size": 6}
CHECKPOINTING = TWO_GROUPS | {"activation_checkpointing": True}
# Grids, tiles, sizes, masks and positions of patches, and rows that TRL pads to one size.
PACKED_TYPES = (
    *("qwen2_vl", "qwen3_vl", "glm4v", "gemma4", "internvl", "lfm2_vl", "llava_next"),
    *("idefics2", "granite_docling"),
)
CHECKED = {"old_logps": "trainer", "verify_every_steps": 1, "max_logprob_drift": 1e-5}

# Gemma 3's tokens of an image see each other in both directions.
pads_gemma3 = pytest.mark.filterwarnings("ignore:loss_forward='packed'. prompts cannot be shared")


@pytest.mark.fast_cases("llava-image-True")
@pytest.mark.parametrize(
    ("model_type", "columns", "is_rloo"),
    [
        ("qwen2_5_vl", "image", False),
        pytest.param("gemma3", "image", False, marks=(pads_gemma3, pytest.mark.slow)),
        ("llava", "image", True),
        pytest.param("qwen2_5_vl", "images", False, marks=pytest.mark.slow),
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
    records = list(iterate_rollouts(tmp_path))
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


@pytest.mark.fast_cases("llava-image-settings4")
@pytest.mark.parametrize(
    ("model_type", "columns", "settings"),
    [
        pytest.param("qwen2_5_vl", "image", {}, marks=pytest.mark.slow),
        ("qwen2_5_vl", "images", {"beta": 0.1, "peft_config": LORA}),
        pytest.param("qwen2_5_vl", "images", TWO_GROUPS, marks=pytest.mark.slow),
        pytest.param("gemma3", "image", TWO_GROUPS, marks=(pads_gemma3, pytest.mark.slow)),
        ("llava", "image", TWO_GROUPS),
        pytest.param("idefics3", "image", TWO_GROUPS, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "image", {"is_rloo": True}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "image", CHECKPOINTING, marks=pytest.mark.slow),
        pytest.param(
            "qwen2_5_vl",
            "images",
            {"steps_per_generation": 2, "gradient_accumulation_steps": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_trls_own_settings_learn_what_trls_path_learns(tmp_path, model_type, columns, settings):
    """From the same tokens: losses and gradients, of the packed loss."""
    settings = TRLS_TESTS | settings
    trainer = vision_trainer(tmp_path / "ours", model_type, columns, **settings)
    attach(trainer, RolloutConfig(old_logps="trainer"))
    ours = watched(trainer)
    trainer.train()
    shares_prompts = model_type != "gemma3"
    assert all(logged(trainer, "rollout/prompts_shared")) is shares_prompts
    other = vision_trainer(tmp_path / "theirs", model_type, columns, **settings)
    theirs = play_back(other, ours.turns)
    other.train()
    assert any(ours.losses)
    assert_learned_alike(ours, theirs)


@pytest.mark.fast_cases("rows_with_images-cannot be divided into rows")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("_difference", "as the test has it"), ("rows_with_images", "cannot be divided into rows")],
)
def test_text_is_packed_where_images_cannot_be(tmp_path, monkeypatch, fault, reason):
    trainer = vision_trainer(tmp_path, per_device_eval_batch_size=4)
    attach(trainer, RolloutConfig(verify_every_steps=0))
    if fault == "_difference":
        own = packed_loss.PackedLoss._difference
        monkeypatch.setattr(
            packed_loss.PackedLoss,
            fault,
            lambda self, run, *rest: reason if run.has_images else own(self, run, *rest),
        )
    else:
        monkeypatch.delattr(packed_loss.images, fault)
    with pytest.warns(UserWarning, match=rf"switched off for batches with images.*{reason}"):
        trainer.train()
    assert not any(logged(trainer, "rollout/prompts_shared"))
    trainer.evaluate(rows("none"))
    assert logged(trainer, "eval_rollout/prompts_shared")[0] > 0
    trainer.vllm_generation.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("model_type", PACKED_TYPES)
def test_the_packed_loss_of_each_kind_of_image_tensors_is_trls(tmp_path, model_type):
    runs = {}
    for name in ("ours", "theirs"):
        made = create(model_type)
        _, placeholder, _ = re.split(r" w12 | w13 ", prompt(made[1], 1))
        template = CHAT_TEMPLATE.replace("<image>", placeholder)
        made[1].chat_template = made[1].tokenizer.chat_template = template
        settings = TRLS_TESTS | TWO_GROUPS | {"learning_rate": 1e-2}
        runs[name] = vision_trainer(tmp_path / name, made=made, **settings)
    generator = attach(runs["ours"], RolloutConfig(old_logps="trainer"))
    ours = watched(runs["ours"])
    runs["ours"].train()
    generator.close()
    assert all(logged(runs["ours"], "rollout/prompts_shared"))
    theirs = play_back(runs["theirs"], ours.turns)
    runs["theirs"].train()
    assert any(float(g.abs().max()) for g in ours.gradients[0].values())
    assert_learned_alike(ours, theirs)


@pytest.mark.fast_cases("frozen tower-copy")
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
    assert encoded[-1] == NUM_PROMPTS
    generator.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rollouts_in_bfloat16_read_images(tmp_path, is_adapted):
    trainer = vision_trainer(tmp_path, bf16=True, peft_config=LORA if is_adapted else None)
    generator = attach(trainer, RolloutConfig(old_logps="trainer"))
    trainer.train()
    # Adapters stay as they are on a CPU, and autocast rounds the weights.
    is_copied = generator.manager.engine.training_model.is_copied
    assert is_copied == (not is_adapted)
    if is_copied:
        vision = generator.manager.model.model.visual
        assert vision.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 0.05
    generator.close()


def test_evaluation_samples_from_the_engine_on_its_own_images(tmp_path):
    trainer = vision_trainer(tmp_path, columns="images", per_device_eval_batch_size=4)
    generator = attach(trainer, RolloutConfig(verify_every_steps=1, max_logprob_drift=1e-5))
    figures = trainer.evaluate(rows("images"))
    assert figures["eval_sampling/sampling_logp_difference/max"] < 1e-5
    records = list(iterate_rollouts(tmp_path))
    assert {record.mode for record in records} == {"eval"}
    assert {len(record.images) for record in records} <= {1, 2}
    generator.close()


@pytest.mark.slow
def test_some_rows_of_a_batch_are_verified_on_their_own_images(tmp_path):
    trainer = vision_trainer(tmp_path, "qwen2_5_vl", "images", learning_rate=1e-2)
    config = {"verify_every_steps": 1, "verify_num_sequences": 3, "max_logprob_drift": 1e-5}
    attach(trainer, RolloutConfig(on_logprob_drift="raise", old_logps="rollout", **config))
    trainer.train()
    assert len(logged(trainer, "rollout/logprob_drift_max")) == NUM_STEPS


def watched_differences(trainer):
    """Of sampled log-probabilities from TRL's own forward of the rows that a loss gets, in nats."""
    compute_loss, differences = trainer.compute_loss, []

    def checked(model, inputs, *rest, **named):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        forward = type(trainer)._get_per_token_logps_and_entropies
        with torch.no_grad():
            found, *_ = forward(trainer, model, ids, mask, width, **image_arguments(inputs))
        found = found * inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if not differences:
            # Later steps of a strategy that carries have tokens of older policies.
            differences.append((found - inputs["sampling_per_token_logps"]).abs().max())
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = checked
    return differences


@pytest.mark.fast_cases("strategy1-image")
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
    differences = watched_differences(trainer)
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


def draw(number: int) -> list:
    """Draws one or two pictures.

    Args:
        number: any.

    Returns:
        The pictures, and a word.
    """
    pictures = [picture(seed, (30 + 8 * (number % 3), 40)) for seed in range(1 + number % 2)]
    return [*({"type": "image", "image": own} for own in pictures), {"type": "text", "text": "w61"}]


def parse_some_ids_as_a_call(tokenizer, ids, prefix=None, tools=()):
    """TRL's `parse_response`, for a model that never learned to write a call."""
    message = {"role": "assistant", "content": tokenizer.decode(ids)}
    if tools and ids[0] % 3:
        call = {"name": tools[0].__name__, "arguments": {"number": ids[0]}}
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message


def tool_trainer(tmp_path, monkeypatch, model_type, image_token, columns, **settings):
    monkeypatch.setattr(grpo, "parse_response", parse_some_ids_as_a_call)
    settings = TOOLS | {"max_completion_length": 140} | settings
    return vision_trainer(
        tmp_path, model_type, columns, tools=[draw], image_token=image_token, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "image_token", "columns"),
    [
        ("qwen2_5_vl", "<|image_pad|>", "image"),
        pytest.param("qwen2_5_vl", "<|image_pad|>", "none", marks=pytest.mark.slow),
        pytest.param("llava", "<image>", "images", marks=pytest.mark.slow),
    ],
)
def test_images_of_tools_are_learned_from_as_on_trls_path(
    tmp_path, monkeypatch, model_type, image_token, columns
):
    arguments = monkeypatch, model_type, image_token, columns
    trainer = tool_trainer(tmp_path / "ours", *arguments)
    generator = attach(trainer, RolloutConfig(**CHECKED))
    ours = watched(trainer)
    trainer.train()
    assert max(logged(trainer, "tools/call_frequency")) > 0.5
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert max(logged(trainer, "tools/failure_frequency")) == 0
    recorded = [len(record.images) for record in list(iterate_rollouts(tmp_path / "ours"))]
    assert max(recorded) > (columns != "none")
    generator.close()
    other = tool_trainer(tmp_path / "theirs", *arguments)
    theirs = play_back(other, ours.turns)
    other.train()
    assert any(ours.losses)
    assert_learned_alike(ours, theirs)


@pytest.mark.slow
def test_images_of_a_tool_that_trl_does_not_find_show_in_the_drift(tmp_path, monkeypatch):
    """TRL 1.16 leaves the pictures out of its loss, and the rollout has seen them."""
    trainer = tool_trainer(tmp_path, monkeypatch, "qwen2_5_vl", "<image>", "none")
    attach(trainer, RolloutConfig(**CHECKED, loss_forward="trainer"))
    with pytest.raises(LogprobDriftError):
        trainer.train()
    trainer.vllm_generation.close()


@pytest.mark.slow
def test_a_strategy_chooses_rows_with_the_images_of_their_tools(tmp_path, monkeypatch):
    arguments = monkeypatch, "qwen2_5_vl", "<|image_pad|>", "image"
    trainer = tool_trainer(tmp_path, *arguments, max_steps=1)
    attach(trainer)
    use_strategy(trainer, DynamicSampling(max_dropped_groups=4))
    differences = watched_differences(trainer)
    trainer.train()
    assert max(logged(trainer, "tools/call_frequency")) > 0.5
    assert differences[0] <= 1e-5
    trainer.vllm_generation.close()
