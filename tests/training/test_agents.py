"""Agents that know only an OpenAI base URL, as the rollouts of a stock trainer."""

from functools import partial

import httpx
import openai
import pytest
from datasets import Dataset
from tiny import CHAT_TEMPLATE
from tiny_trainer import logged, tiny_trainer

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutError,
    SavedRollouts,
    agent_reward,
    attach,
    detach,
    make_agent_rollout,
)

CHATS = [{"prompt": [{"role": "user", "content": f"{n} is what?"}]} for n in range(32)]
CONFIG = RolloutConfig(verify_every_steps=1, max_logprob_drift=1e-4)


def in_chats(tokenizer):
    tokenizer.chat_template = CHAT_TEMPLATE


def trainer_of(output_dir, agent, **more):
    return tiny_trainer(
        output_dir,
        reward=agent_reward,
        prepare_tokenizer=in_chats,
        per_device_train_batch_size=8,
        num_generations=4,
        trainer_arguments={
            "rollout_func": make_agent_rollout(agent, num_threads=4, **more),
            "train_dataset": Dataset.from_list(CHATS),
        },
    )


def talk(base_url, prompt, forgets=False):
    """An agent of three turns."""
    messages, text = list(prompt), ""
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        for turn in range(3):
            if forgets and turn == 1:
                messages = [{"role": "user", "content": "a summary"}]
            response = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=4
            )
            text += response.choices[0].message.content
            messages.append({"role": "assistant", "content": response.choices[0].message.content})
            messages.append({"role": "user", "content": f"{turn}"})
    return text.count("7") / max(1, len(text))


def test_an_agent_trains_the_policy_that_it_talks_to(tmp_path):
    trainer = trainer_of(tmp_path, talk)
    attach(trainer, CONFIG)
    seen = []
    backend = trainer.vllm_generation
    end_rollout = backend.end_rollout
    backend.end_rollout = lambda: (seen.append(backend.context), end_rollout())
    trainer.train()
    assert trainer.state.global_step == len(seen) == 3
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert logged(trainer, "rollout/policy_version") == [1, 2, 3]
    for version, context in enumerate(seen, 1):
        engine = {output.request_id: output for output in context.outputs}
        assert len(engine) == 8 * 3
        for row in context.rows:
            of_own = [v for v, own in zip(row.versions, row.is_sampled, strict=True) if own]
            assert set(of_own) == {version}
            assert row.request_id in engine
        sampled = [
            logprob
            for row in context.rows
            for logprob, own in zip(row.logprobs, row.is_sampled, strict=True)
            if own
        ]
        known = [logprob for output in engine.values() for logprob in output.logprobs]
        left_out = len(known) - len(sampled)
        assert left_out >= 0
        assert set(sampled) <= set(known)
    means = logged(trainer, "rewards/agent_reward/mean")
    assert means == pytest.approx([sum(c.rewards) / len(c.rewards) for c in seen])
    detach(trainer)


@pytest.mark.slow
def test_a_rewritten_history_is_counted_and_its_longest_part_trained_on(tmp_path):
    trainer = trainer_of(tmp_path, partial(talk, forgets=True))
    attach(trainer, CONFIG)
    trainer.train()
    assert min(logged(trainer, "rollout/agent_tokens_left_out")) >= 0.3
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    detach(trainer)


@pytest.mark.slow
def test_a_reward_may_be_posted(tmp_path):
    def agent(base_url, prompt):
        reward = talk(base_url, prompt)
        ending = base_url.removesuffix("/v1") + "/end"
        assert httpx.post(ending, json={"reward": reward + 1}).status_code == 200

    trainer = trainer_of(tmp_path, agent)
    attach(trainer, CONFIG)
    trainer.train()
    assert min(logged(trainer, "rewards/agent_reward/mean")) >= 1
    detach(trainer)


def silent(base_url, prompt):
    return 1.0


def raising(base_url, prompt):
    talk(base_url, prompt)
    raise ZeroDivisionError("the agent's own")


def without_reward(base_url, prompt):
    talk(base_url, prompt)


@pytest.mark.parametrize(
    ("agent", "error", "text"),
    [
        (silent, RolloutError, "made no request"),
        (raising, ZeroDivisionError, "the agent's own"),
        (without_reward, RolloutError, "got no reward"),
    ],
)
@pytest.mark.slow
def test_an_agent_that_fails_ends_the_training(tmp_path, agent, error, text):
    trainer = trainer_of(tmp_path, agent, timeout_seconds=3.0)
    attach(trainer, CONFIG)
    with pytest.raises(error, match=text):
        trainer.train()
    detach(trainer)


def test_without_an_engine_it_is_refused(tmp_path):
    trainer = trainer_of(tmp_path / "first", talk)
    with pytest.raises(ConfigurationError, match=r"call cb_rollout.attach"):
        trainer.train()
    folder = str(tmp_path / "rollouts")
    attach(trainer, RolloutConfig(save_rollouts=folder))
    trainer.train()
    detach(trainer)
    attach(trainer, SavedRollouts(folder))
    with pytest.raises(ConfigurationError, match="an engine of this process"):
        trainer.train()
