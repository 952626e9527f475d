"""Every loss, under every correction and every feature of TRL's, learns what it would from TRL's
own `generate` path, given the same tokens."""

import gc
import itertools
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from playback import TOOLS, Counter, assert_learned_alike, double, play_back, watched, with_tools
from tiny_trainer import PROBLEMS, share_of_sevens, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import RolloutConfig, attach, detach

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 8,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
}
# Refused with the modes that weigh whole sequences, by TRL and by attach.
FEATURES = {
    "accumulate": {"gradient_accumulation_steps": 2},
    "iterate": {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4},
    "evaluate": {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 4},
    "resume": {"save_strategy": "steps", "save_steps": 1, "max_steps": 1},
    "lora": {"beta": 0.04},
    "tools": TOOLS,
    "environment": TOOLS,
}
SEQUENCE_LOSSES = {"vespo"}


@pytest.fixture(autouse=True)
def what_was_imported_is_no_garbage():
    """Each `train()` collects garbage, which takes four times as long as the rest of a cell."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def cells():
    return [
        (loss, mode, feature)
        for loss, mode, feature in itertools.product(LOSSES, MODES, FEATURES)
        if not (loss in SEQUENCE_LOSSES and mode.startswith("sequence"))
    ]


COVERING = [
    ("grpo", "sequence_mask", "accumulate"),
    ("bnpo", "token_mask", "iterate"),
    ("dr_grpo", "sequence_truncate", "evaluate"),
    ("dapo", "token_truncate", "resume"),
    ("cispo", "sequence_mask", "lora"),
    ("sapo", "token_mask", "tools"),
    ("vespo", "token_truncate", "environment"),
    ("luspo", "sequence_truncate", "tools"),
]
# Every loss, every mode and every feature at least once.


def a_trainer(output_dir, feature, monkeypatch, **settings):
    arguments = {}
    trainer_settings = SMALL | FEATURES.get(feature, {}) | settings
    if feature == "lora":
        arguments["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if feature in ("tools", "environment"):
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS[:8]]
        arguments |= {"train_dataset": Dataset.from_list(rows)}
        kind = {"tools": [double]} if feature == "tools" else {"environment_factory": Counter}
        arguments |= kind
    torch.manual_seed(0)
    return tiny_trainer(
        output_dir,
        reward=lambda completions, **_: share_of_sevens([str(c) for c in completions]),
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments=arguments,
        num_hidden_layers=1,
        **trainer_settings,
    )


def train(trainer, feature):
    torch.manual_seed(0)
    trainer.train()
    if feature == "resume":
        trainer.args.max_steps = 2
        trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-1")
        trainer.args.max_steps = 1
        shutil.rmtree(f"{trainer.args.output_dir}/checkpoint-2")
    if feature == "evaluate":
        trainer.evaluate()


@pytest.mark.parametrize(("loss", "mode", "feature"), COVERING)
def test_a_cell_learns_what_trl_would(tmp_path, monkeypatch, loss, mode, feature):
    settings = {"loss_type": loss, "vllm_importance_sampling_mode": mode}
    ours = a_trainer(tmp_path / "ours", feature, monkeypatch, **settings)
    index = COVERING.index((loss, mode, feature))
    config = RolloutConfig(
        old_logps=("trainer", "rollout")[index // 2 % 2],
        loss_forward=("trainer", "packed")[index % 2],
        verify_every_steps=0,
    )
    generator = attach(ours, config)
    own = watched(ours)
    train(ours, feature)
    generator.close()
    theirs = a_trainer(tmp_path / "theirs", feature, monkeypatch, **settings)
    assert not theirs.use_vllm
    other = play_back(theirs, own.turns)
    train(theirs, feature)
    assert_learned_alike(own, other)
    if feature in ("tools", "environment"):
        assert len(own.turns) > 2, "no tool was called"


# What these do comes around the loss, whose forward is the other features' to vary.
AROUND_THE_LOSS = ("resume", "evaluate")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "loss_forward"),
    [
        (feature, loss_forward)
        for feature in FEATURES
        for loss_forward in ("trainer", "packed")
        if loss_forward == "packed" or feature not in AROUND_THE_LOSS
    ],
)
def test_the_whole_matrix_learns_what_trl_would(tmp_path, monkeypatch, feature, loss_forward):
    ours = a_trainer(tmp_path / "ours", feature, monkeypatch)
    theirs = a_trainer(tmp_path / "theirs", feature, monkeypatch)
    generator = attach(ours, RolloutConfig(verify_every_steps=0, loss_forward=loss_forward))
    own, other = watched(ours), play_back(theirs, [])
    weights = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    for loss, mode, _ in (cell for cell in cells() if cell[2] == feature):
        for trainer, record in ((ours, own), (theirs, other)):
            trainer.model.load_state_dict(weights)
            trainer.loss_type, trainer.vllm_importance_sampling_mode = loss, mode
            trainer._step, trainer._buffered_inputs = 0, None
            record.forget()
            if trainer is theirs:
                record.remaining = iter(own.turns)
            train(trainer, feature)
        assert_learned_alike(own, other)
    generator.close()


def test_rloo_learns_what_trl_would(tmp_path, monkeypatch):
    classes = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
    settings = {"beta": 0.0, "num_iterations": 2, "steps_per_generation": 2} | classes
    ours = a_trainer(tmp_path / "ours", "", monkeypatch, **settings)
    attach(ours, RolloutConfig(old_logps="rollout"))
    own = watched(ours)
    train(ours, "")
    theirs = a_trainer(tmp_path / "theirs", "", monkeypatch, **settings)
    other = play_back(theirs, own.turns)
    train(theirs, "")
    assert_learned_alike(own, other)
    detach(ours)
