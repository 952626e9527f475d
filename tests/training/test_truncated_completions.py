"""Which completions count as whole, where stop strings or further tokens end them."""

import math
import string

import pytest
from playback import TOOLS, assert_learned_alike, double, play_back, watched, with_tools
from tiny import EOS, char_tokenizer, tiny_model
from tiny_trainer import tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, SamplingParams, attach, make_rollout_func

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}
SEVEN = char_tokenizer().convert_tokens_to_ids("7")
MASKED = {"mask_truncated_completions": True, "max_completion_length": 30}
WHOLE = [
    f"completions/{name}"
    for name in (
        "clipped_ratio",
        "mean_terminated_length",
        "min_terminated_length",
        "max_terminated_length",
    )
]


def logged(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def trained_as_trl_would(output_dir, turns, **settings):
    """TRL's own trainer, of a model whose end-of-sequence tokens hold the 7, on these tokens."""
    model = tiny_model(vocab_size=99)
    model.generation_config.eos_token_id = [EOS, SEVEN]
    trainer = tiny_trainer(output_dir, model=model, **(QUICK | MASKED | settings))
    assert set(trainer.eos_token_ids) == {EOS, SEVEN}
    record = play_back(trainer, turns)
    trainer.train()
    return trainer, record


@pytest.mark.parametrize(
    ("end", "old_logps"),
    [
        ({"stop_strings": ["7"]}, "trainer"),
        ({"eos_token_id": [EOS, SEVEN]}, "rollout"),
        pytest.param({"stop_strings": ["7"]}, "rollout", marks=pytest.mark.slow),
        pytest.param({"eos_token_id": [EOS, SEVEN]}, "trainer", marks=pytest.mark.slow),
    ],
)
def test_what_a_stop_string_or_another_token_ended_is_not_left_out(tmp_path, end, old_logps):
    settings = {"generation_kwargs": end, "num_iterations": 2, "max_steps": 4}
    trainer = tiny_trainer(tmp_path / "ours", **(QUICK | MASKED | settings))
    generator = attach(trainer, RolloutConfig(old_logps=old_logps, verify_every_steps=1))
    assert trainer.mask_truncated_completions
    ours, score, batches = watched(trainer), trainer._generate_and_score_completions, []

    def score_and_keep(inputs):
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = score_and_keep
    trainer.train()
    generator.close()
    assert trainer.mask_truncated_completions
    whole = [ids[-1] in (EOS, SEVEN) for turn in ours.turns for ids in turn]
    assert any(whole)
    assert not all(whole)
    masks = [bool(mask.any()) for batch in batches for mask in batch["completion_mask"]]
    assert masks == whole
    for batch in batches:
        assert batch["num_items_in_batch"] == batch["completion_mask"].sum()
    del settings["generation_kwargs"]
    theirs, record = trained_as_trl_would(tmp_path / "theirs", ours.turns, **settings)
    assert_learned_alike(ours, record)
    for name in WHOLE:
        assert logged(trainer, name) == pytest.approx(logged(theirs, name)), name
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5


def test_the_text_decides_and_not_the_last_token(tmp_path):
    stops = [a + b for a in string.ascii_lowercase[:13] for b in string.ascii_lowercase]
    settings = MASKED | {"generation_kwargs": {"stop_strings": stops}}
    trainer = tiny_trainer(tmp_path, **(QUICK | settings | {"max_completion_length": 12}))
    generator = attach(trainer)
    record, score, masks = watched(trainer), trainer._generate_and_score_completions, []

    def score_and_keep(inputs):
        batch = score(inputs)
        masks.extend(bool(mask.any()) for mask in batch["completion_mask"])
        return batch

    trainer._generate_and_score_completions = score_and_keep
    trainer.train()
    generator.close()
    completions = [ids for turn in record.turns for ids in turn]
    texts = [trainer.processing_class.decode(ids) for ids in completions]
    stopped = [any(stop in text for stop in stops) for text in texts]
    assert masks == [s or ids[-1] == EOS for s, ids in zip(stopped, completions, strict=True)]
    assert any(stopped)
    assert not all(masks)


def test_a_rollout_funcs_own_stop_is_known_too(tmp_path):
    rollout = make_rollout_func(SamplingParams(stop=("7", "8", "9"), max_new_tokens=30))
    arguments = {"trainer_arguments": {"rollout_func": rollout}}
    trainer = tiny_trainer(tmp_path, **(QUICK | MASKED | arguments))
    generator = attach(trainer)
    trainer.train()
    generator.close()
    assert min(logged(trainer, "completions/clipped_ratio")) < 1
    assert max(logged(trainer, "completions/max_terminated_length")) > 0


def test_the_last_turn_of_a_tool_loop_decides(tmp_path, monkeypatch):
    settings = TOOLS | {"generation_kwargs": {"max_new_tokens": 6, "stop_strings": ["7", "a", "e"]}}
    trainer = tiny_trainer(
        tmp_path,
        reward=lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments={"tools": [double]},
        mask_truncated_completions=True,
        **(QUICK | settings),
    )
    trainer.train_dataset = trainer.train_dataset.map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]}
    )
    generator = attach(trainer)
    score, generate, rows, seen = trainer._generate_and_score_completions, trainer._generate, [], []

    def generate_and_keep(prompts):
        generated = generate(prompts)
        rows[:] = [tuple(p) + tuple(c) for p, c in zip(*generated[:2], strict=True)]
        return generated

    def score_and_keep(inputs):
        batch = score(inputs)
        reasons = {
            (*output.prompt_ids, *output.generated_tokens): output.finish_reason
            for output in trainer.vllm_generation.context.outputs
        }
        mask_BT = batch["completion_mask"]
        assert mask_BT.any(1).tolist() == [reasons.get(row) == "stop" for row in rows]
        assert (batch["tool_mask"] * mask_BT).any(1).tolist() == mask_BT.any(1).tolist()
        seen.extend(mask_BT.any(1).tolist())
        return batch

    trainer._generate = generate_and_keep
    trainer._generate_and_score_completions = score_and_keep
    trainer.train()
    generator.close()
    assert len(trainer.vllm_generation.context.outputs) > 8
    assert set(seen) == {True, False}
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss"))


def test_rloo_counts_what_it_leaves_out_and_so_refuses(tmp_path):
    rloo = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
    for end, said in (
        ({"stop_strings": ["7"]}, "a stop string ended"),
        ({"eos_token_id": [1, 9]}, "token 9 ended"),
    ):
        settings = {"generation_kwargs": end, "mask_truncated_completions": True}
        with pytest.raises(ConfigurationError, match=f"would mask completions that {said}"):
            attach(tiny_trainer(tmp_path, **(rloo | settings)))
        attach(tiny_trainer(tmp_path, **rloo, generation_kwargs=end)).close()
