"""TRL's on-policy trainers beside GRPO and RLOO: attached, each trains as on its own path."""

import os
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import byte_tokenizer, tiny_model
from tiny_trainer import in_own_names, logged
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import cb_rollout
from cb_rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from trl import DistillationConfig, DistillationTrainer, SFTConfig, SFTTrainer
from trl.experimental.gold import GOLDConfig, GOLDTrainer
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

NUM_TOKENS = 12
SUMS = [(a, b) for a in range(4) for b in range(4)]
PROMPTS = [{"prompt": f"{a}+{b}="} for a, b in SUMS]
HINTS = [{"prompt": f"{a}+{b}=", "privileged_context": f"It is {a + b}."} for a, b in SUMS]
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+{b}=" + "?" * b},
            {"role": "assistant", "content": str(a + b)},
        ]
    }
    for a, b in SUMS
]


def length(completions, **_):
    """A reward that differs within a group."""
    return [len(completion) / 24 for completion in completions]


LENGTH, NEW = {"max_completion_length": NUM_TOKENS}, {"max_new_tokens": NUM_TOKENS}
FEEDBACK = {"include_environment_feedback": True}
ALL_LOGITS = {"distillation_mode": "full_logits", "num_generations": 2, **LENGTH}

TEACHER, REWARD = "teacher_model", "reward_funcs"
SLICES = {"lmbda": 1.0, **LENGTH}

# Trainer, config, data, settings, and the further argument that it needs.
CASES = {
    "distillation": (DistillationTrainer, DistillationConfig, PROMPTS, LENGTH, TEACHER),
    "gold": (GOLDTrainer, GOLDConfig, CHATS, {"max_length": 64, **SLICES}, TEACHER),
    "iw_opd": (IWOPDTrainer, IWOPDConfig, CHATS, SLICES, TEACHER),
    "sdft": (SDFTTrainer, SDFTConfig, HINTS, ALL_LOGITS, None),
    "sdpo": (SDPOTrainer, SDPOConfig, HINTS, FEEDBACK | ALL_LOGITS, REWARD),
    "online_dpo": (OnlineDPOTrainer, OnlineDPOConfig, PROMPTS, NEW, REWARD),
}

# The others take as long and share the code.
FAST = ("iw_opd", "online_dpo")
EACH = [pytest.param(case, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of a student and a teacher, with a tokenizer each."""
    made = {}
    for seed, name in enumerate(("student", "teacher")):
        path = made[name] = tmp_path_factory.mktemp(name)
        tokenizer = byte_tokenizer()
        tiny_model(vocab_size=len(tokenizer), seed=seed).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return made


def created(case, folders, tmp_path, peft_config=None, **settings):
    trainer_class, config_class, data, own, wanted = CASES[case]
    arguments = {
        TEACHER: {"teacher_model": str(folders["teacher"])},
        REWARD: {"reward_funcs": length},
        None: {},
    }[wanted]
    defaults = {
        "output_dir": str(tmp_path),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "activation_checkpointing": False,
        "seed": 3,
    }
    config = config_class(**in_own_names(config_class, defaults | own | settings))
    return trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folders["student"]),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=byte_tokenizer(),
        peft_config=peft_config,
        **arguments,
    )


def keep_samples(trainer):
    """Keep the completions that an attached trainer samples, by prompt, in order."""
    backend, kept = trainer.vllm_generation, {}
    sample = backend.sample

    def kept_sample(prompts, *args):
        outputs = sample(prompts, *args)
        for output in outputs:
            kept.setdefault(tuple(output.prompt_ids), []).append(output.generated_tokens)
        return outputs

    backend.sample = kept_sample
    return kept


def replay(trainer, kept):
    """Have `generate` of a stock trainer's model return these completions."""

    def generate(input_ids, attention_mask=None, return_dict_in_generate=False, **_):
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        taken = [torch.tensor(kept[tuple(ids[mask].tolist())].pop(0)) for ids, mask in rows]
        sequences = torch.cat([input_ids, pad_sequence(taken, batch_first=True)], dim=1)
        return SimpleNamespace(sequences=sequences) if return_dict_in_generate else sequences

    trainer.model.generate = generate


@pytest.mark.parametrize("case", EACH)
def test_loss_and_gradients_equal_the_trainers_own_path_on_the_same_tokens(case, folders, tmp_path):
    attached = created(case, folders, tmp_path)
    cb_rollout.attach(attached)
    kept = keep_samples(attached)
    attached.train()
    cb_rollout.detach(attached)

    stock = created(case, folders, tmp_path)
    replay(stock, kept)
    stock.train()
    assert not any(kept.values())
    losses = logged(attached, "loss")
    assert len(losses) == 3
    assert losses == pytest.approx(logged(stock, "loss"), abs=2e-5)
    # Plain gradient descent: weights that agree have had gradients that agree.
    before = AutoModelForCausalLM.from_pretrained(folders["student"]).state_dict()
    trained = attached.model.state_dict()
    for name, tensor in stock.model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=1e-4)
    assert any((trained[name] - before[name]).abs().max() > 1e-5 for name in before)


@pytest.mark.parametrize("case", EACH)
def test_a_run_resumed_from_a_checkpoint_has_the_losses_of_a_whole_one(case, folders, tmp_path):
    losses = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = created(case, folders, tmp_path, save_strategy="steps", save_steps=2)
        cb_rollout.attach(trainer, RolloutConfig(seed=5))
        trainer.train(resume_from_checkpoint=checkpoint)
        cb_rollout.detach(trainer)
        losses.append(logged(trainer, "loss"))
    whole, resumed = losses
    assert len(whole) == 3
    assert resumed == pytest.approx(whole, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_three_steps_run_with_lora_and_log_the_rollout(case, folders, tmp_path):
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = created(case, folders, tmp_path, lora, optim="adamw_torch")
    generator = cb_rollout.attach(trainer, RolloutConfig(seed=5))
    trainer.train()
    tokens = logged(trainer, "rollout/tokens")
    assert len(tokens) == 3
    assert min(tokens) > 0
    # A sync a step: no token of old weights.
    assert generator.policy_version == 3
    cb_rollout.detach(trainer)
    assert "generate" not in vars(trainer.model)


def test_a_setting_that_changes_the_loss_is_refused_by_name(folders, tmp_path):
    trainer = created("sdft", folders, tmp_path)
    for settings, name in (
        ({"sampling_mask": "replay"}, "sampling_mask='replay'"),
        ({"router_replay": True}, "router_replay=True"),
        ({"numerics": "bitwise"}, "numerics='bitwise'"),
    ):
        with pytest.raises(ConfigurationError, match=name):
            cb_rollout.attach(trainer, RolloutConfig(**settings))


def test_another_trainer_is_refused_with_the_names_of_those_that_are_taken(folders, tmp_path):
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folders["student"]),
        args=SFTConfig(**settings),
        train_dataset=Dataset.from_list(CHATS),
        processing_class=byte_tokenizer(),
    )
    with pytest.raises(ConfigurationError, match="SDPOTrainer, not a SFTTrainer"):
        cb_rollout.attach(trainer)


def test_a_method_that_trl_renames_is_named(folders, tmp_path, monkeypatch):
    monkeypatch.delattr(SDFTTrainer, "_generate")
    with pytest.raises(ConfigurationError, match=r"missing: _generate"):
        cb_rollout.attach(created("sdft", folders, tmp_path))
