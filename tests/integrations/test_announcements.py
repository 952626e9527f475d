import logging

import pytest
from datasets import Dataset, IterableDataset
from tiny_trainer import PROBLEMS, tiny_trainer
from torch._inductor import config as inductor_config

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach
from cb_rollout.integrations.announcements import hindrance

CHAT = [{"prompt": [{"role": "user", "content": "1+1="}]}] * 8
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def said_at_attach(caplog, tmp_path, config, **settings):
    with caplog.at_level(logging.WARNING, logger="cb_rollout"):
        trainer = tiny_trainer(tmp_path, **settings)
        attach(trainer, config)
        detach(trainer)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_cache_for_few_sequences_is_told_of_with_its_size(caplog, tmp_path, num_blocks):
    config = RolloutConfig(seed=0, num_blocks=num_blocks, block_size=16)
    (text,) = said_at_attach(caplog, tmp_path, config)
    assert f"about {num_blocks // 2} of a rollout's 16 sequences" in text
    assert "Raise num_blocks" in text
    assert "\n" not in text


def test_a_cache_that_holds_the_rollout_is_not_told_of(caplog, tmp_path):
    assert said_at_attach(caplog, tmp_path, RolloutConfig(seed=0)) == []


def test_a_missing_compiler_is_told_of_with_the_name_that_was_tried(caplog, tmp_path):
    with inductor_config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        (text,) = said_at_attach(caplog, tmp_path, RolloutConfig(seed=0))
    assert "slower" in text
    assert "C++ compiler" in text
    assert "(tried no-such-compiler)" in text


def test_threads_that_hinder_each_other_are_told_of_by_the_variable_that_sets_them():
    (text,) = hindrance(num_threads=2, together=9.0, alone=3.0)
    assert "2 torch threads take 3.0 times as long as one" in text
    assert "OMP_NUM_THREADS" in text
    assert list(hindrance(num_threads=2, together=2.0, alone=3.0)) == []
    assert list(hindrance(num_threads=8, together=3.0, alone=3.0)) == []


@pytest.mark.slow
def test_the_first_step_is_said_to_take_longer_where_it_compiles(caplog, tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=1, max_completion_length=300)
    attach(trainer, RolloutConfig(seed=0))
    with caplog.at_level(logging.WARNING, logger="cb_rollout"):
        trainer.train()
    assert any("the first step takes longer" in r.getMessage() for r in caplog.records)


def without_template(tokenizer):
    tokenizer.chat_template = None


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_chats_without_a_template_are_refused_by_attach(tmp_path, name):
    trainer = tiny_trainer(
        tmp_path,
        prepare_tokenizer=without_template,
        trainer_arguments={name: Dataset.from_list(CHAT)},
    )
    with pytest.raises(ConfigurationError, match=f"prompts of {name} are chats .*chat_template"):
        attach(trainer, RolloutConfig(seed=0))


def test_one_of_several_evaluations_is_named(tmp_path):
    data = {"plain": Dataset.from_list(PROBLEMS[:8]), "chat": Dataset.from_list(CHAT)}
    trainer = tiny_trainer(
        tmp_path, prepare_tokenizer=without_template, trainer_arguments={"eval_dataset": data}
    )
    with pytest.raises(ConfigurationError, match=r"eval_dataset\['chat'\]"):
        attach(trainer, RolloutConfig(seed=0))


def test_a_data_set_without_prompts_names_the_columns_that_it_has(tmp_path):
    data = Dataset.from_list([{"question": "1+1=", "answer": "2"}] * 8)
    trainer = tiny_trainer(tmp_path, trainer_arguments={"train_dataset": data})
    with pytest.raises(ConfigurationError, match="no 'prompt', only 'question', 'answer'"):
        attach(trainer, RolloutConfig(seed=0))


def set_template(tokenizer):
    tokenizer.chat_template = TEMPLATE


def test_chats_with_a_template_and_streamed_data_are_taken(tmp_path):
    chats = {"train_dataset": Dataset.from_list(CHAT), "eval_dataset": Dataset.from_list(CHAT)}
    trainer = tiny_trainer(tmp_path, prepare_tokenizer=set_template, trainer_arguments=chats)
    detach(attached(trainer))
    streamed = IterableDataset.from_generator(lambda: iter(CHAT))
    arguments = {"train_dataset": streamed, "eval_dataset": None}
    trainer = tiny_trainer(
        tmp_path, prepare_tokenizer=without_template, trainer_arguments=arguments
    )
    detach(attached(trainer))


def attached(trainer):
    attach(trainer, RolloutConfig(seed=0))
    return trainer
