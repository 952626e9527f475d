"""A stock trainer of a vision-language model rolls out attached, on prompts with images."""

import pytest
from datasets import Dataset, Image
from tiny_trainer import logged
from tiny_vision import picture, tiny_vision_model
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import attach
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import DynamicSampling

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 2, 4

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


def vision_trainer(tmp_path, model_type="qwen2_5_vl", columns="image", is_rloo=False, **settings):
    model, processor = tiny_vision_model(model_type)
    # As TRL loads it.
    processor.tokenizer.padding_side = "left"
    trainer_class, config_class = (
        (RLOOTrainer, RLOOConfig) if is_rloo else (GRPOTrainer, GRPOConfig)
    )
    return trainer_class(
        model=model,
        reward_funcs=share_of_low_ids,
        args=config_class(
            output_dir=str(tmp_path),
            max_steps=NUM_STEPS,
            per_device_train_batch_size=NUM_PROMPTS * NUM_GENERATIONS,
            num_generations=NUM_GENERATIONS,
            max_completion_length=6,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            activation_checkpointing=False,
            beta=0.0,
            **settings,
        ),
        processing_class=processor,
        train_dataset=rows(columns),
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


def test_a_strategy_refuses_images(tmp_path):
    trainer = vision_trainer(tmp_path)
    attach(trainer)
    with pytest.raises(ConfigurationError, match="a data set with images"):
        use_strategy(trainer, DynamicSampling())
