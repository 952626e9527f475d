"""A stock AsyncGRPOTrainer, rolled out in its own process, on a tiny model."""

import json
import queue

import pytest
import torch
from datasets import Dataset
from tiny import char_tokenizer, plain_logprobs, save_checkpoint, tiny_model
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from cb_rollout import (
    ConfigurationError,
    GenerationOutput,
    RolloutConfig,
    RolloutError,
    WeightSyncError,
)
from cb_rollout.integrations.async_grpo.samples import summed_rewards
from cb_rollout.integrations.async_grpo.tree_attention import plain_tree_attention
from cb_rollout.integrations.async_grpo.worker import AsyncRollouts
from cb_rollout.strategies import DynamicSampling

ROWS = [{"prompt": f"{i}+{j}=", "answer": str(i + j)} for i in range(4) for j in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_checkpoint(tmp_path_factory.mktemp("model")))


def settings_of(tmp_path, **changes):
    settings = {
        "output_dir": str(tmp_path),
        "max_steps": 5,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "token_budget": 0,
        "max_staleness": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
    }
    return AsyncGRPOConfig(**(settings | changes))


def share_of_sevens(completions, answer, **_):
    assert len(completions) == len(answer)
    return [completion.count("7") / max(1, len(completion)) for completion in completions]


def rollouts_of(checkpoint, args, **settings):
    return AsyncRollouts(
        checkpoint,
        args,
        Dataset.from_list(ROWS),
        share_of_sevens,
        config=RolloutConfig(),
        **settings,
    )


class Watched(AsyncRollouts):
    """Keeps each sample as the trainer takes it, and each version's weights."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.taken, self.policies = [], {}

    def _report_age(self, sample):
        super()._report_age(sample)
        self.taken.append((self._version.value, sample))

    def update_model_version(self, model_version):
        super().update_model_version(model_version)
        policy = tiny_model(vocab_size=99)
        policy.load_state_dict(self.generator.manager.model.state_dict())
        self.policies[model_version] = policy


def trained(checkpoint, args, rollouts):
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=args,
        train_dataset=Dataset.from_list(ROWS),
        processing_class=char_tokenizer(),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    trainer.train()
    return trainer


def test_every_token_is_reported_under_the_policy_that_sampled_it(checkpoint, tmp_path):
    args = settings_of(tmp_path)
    rollouts = Watched(
        checkpoint, args, Dataset.from_list(ROWS), share_of_sevens, config=RolloutConfig()
    )
    trainer = trained(checkpoint, args, rollouts)
    assert trainer.state.global_step == 5
    assert not rollouts.generator.manager.is_running()
    assert len({id(sample) for _, sample in rollouts.taken}) == len(rollouts.taken) >= 40
    for model_version, sample in rollouts.taken:
        num_prompt = int((sample.completion_mask == 0).sum())
        ids, logprobs = sample.input_ids.tolist(), sample.old_log_probs.tolist()
        prompt, sampled = ids[:num_prompt], ids[num_prompt:]
        assert sum(count for _, count in sample.token_versions) == len(sampled)
        assert sample.model_version <= model_version
        start = 0
        for version, count in sample.token_versions:
            expected = plain_logprobs(rollouts.policies[version], prompt, sampled)
            end = start + count
            found = logprobs[num_prompt + start : num_prompt + end]
            assert found == pytest.approx(expected[start:end], abs=1e-5)
            start = end
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert all(log["sample/staleness_max"] <= args.max_staleness for log in logs)
    assert any(log["rollout/staleness_mean"] > 0 for log in logs)
    # The trainer's first step is on its own policy, so its ratio says whether the forwards agree.
    fresh = [log for log in logs if log["rollout/staleness_max"] == 0]
    assert all(log["ratio"] == pytest.approx(1.0, abs=1e-4) for log in fresh)
    assert logs[0] in fresh


def test_a_strategy_drops_groups_of_an_asynchronous_run(checkpoint, tmp_path):
    def mostly_equal(completions, **_):
        return [float("7" in completion) for completion in completions]

    args = settings_of(tmp_path, max_steps=2)
    rollouts = AsyncRollouts(
        checkpoint,
        args,
        Dataset.from_list(ROWS),
        mostly_equal,
        config=RolloutConfig(),
        strategy=DynamicSampling(max_dropped_groups=200),
    )
    trainer = trained(checkpoint, args, rollouts)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert all(log["reward_std"] > 0 for log in logs)
    # Logged with the first step after a collection; one may fill two steps.
    assert sum(log.get("rollout/groups_dropped_total", 0) for log in logs) > 0


@pytest.mark.slow
def test_a_reward_that_raises_ends_the_run_with_its_cause(checkpoint, tmp_path):
    def broken(**_):
        raise KeyError("answer")

    args = settings_of(tmp_path)
    rollouts = AsyncRollouts(checkpoint, args, Dataset.from_list(ROWS), broken)
    with pytest.raises(RolloutError, match="the rollout thread ended on KeyError"):
        trained(checkpoint, args, rollouts)
    assert not rollouts.generator.manager.is_running()


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending | default('=') }}"


def test_chats_are_rendered_with_the_trainers_chat_template_kwargs(checkpoint, tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    chats = [{"prompt": [{"role": "user", "content": f"{i}+2"}], "answer": "3"} for i in range(4)]
    seen = []

    def reward(prompts, completions, **_):
        seen.append((prompts[0], completions[0]))
        return [float(len(completion[0]["content"])) for completion in completions]

    args = settings_of(tmp_path, max_steps=1, chat_template_kwargs={"ending": "-5="})
    data = Dataset.from_list(chats)
    rollouts = Watched(checkpoint, args, data, reward, processing_class=tokenizer)
    trained(checkpoint, args, rollouts)
    texts = {
        tokenizer.decode(sample.input_ids[sample.completion_mask == 0])
        for _, sample in rollouts.taken
    }
    assert texts
    assert all(text.endswith("+2-5=") for text in texts)
    # Rewards and traces see the chat.
    assert all(prompt in [row["prompt"] for row in chats] for prompt, _ in seen)
    assert all(answer[0]["role"] == "assistant" for _, answer in seen)
    assert all(sample.prompt in [row["prompt"] for row in chats] for _, sample in rollouts.taken)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_first_prompt_that_was_not_trained_on(checkpoint, tmp_path):
    def run(max_steps, **resume):
        args = settings_of(
            tmp_path, max_steps=max_steps, save_strategy="steps", save_steps=2, num_train_epochs=9
        )
        rollouts = Watched(checkpoint, args, Dataset.from_list(ROWS), share_of_sevens)
        trainer = AsyncGRPOTrainer(
            model=checkpoint,
            args=args,
            train_dataset=Dataset.from_list(ROWS),
            processing_class=char_tokenizer(),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
            callbacks=[rollouts.callback],
        )
        trainer.train(**resume)
        return [sample.group_id for _, sample in rollouts.taken]

    first = run(4)
    saved = json.loads((tmp_path / "checkpoint-4" / "cb_rollout_prompts.json").read_text())
    assert min(first) == 0
    # Four steps trained on eight groups; those of the first prompts may have come late.
    assert 4 <= saved["position"] <= 8
    second = run(6, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert min(second) == saved["position"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_budget": None}, "token_budget=None asks a vLLM server"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"num_generations": 64}, "num_generations=64 is larger than max_staleness=2 steps of 8"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(checkpoint, tmp_path, changes, said):
    with pytest.raises(ConfigurationError, match=said):
        rollouts_of(checkpoint, settings_of(tmp_path, **changes))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (RolloutConfig(weight_sync="copy"), "is already a copy"),
        (RolloutConfig(router_replay=True), "batches carry no experts"),
        (RolloutConfig(return_logprobs=False), "return_logprobs=False"),
    ],
)
def test_an_engine_setting_that_cannot_be_honoured_is_refused(checkpoint, tmp_path, config, said):
    with pytest.raises(ConfigurationError, match=said):
        AsyncRollouts(checkpoint, settings_of(tmp_path), [], share_of_sevens, config=config)


@pytest.mark.parametrize(
    ("dataset", "reward", "said"),
    [
        (Dataset.from_list([{"question": "1+1="}]), share_of_sevens, "'prompt', only question"),
        (None, share_of_sevens, "train_dataset is a NoneType"),
        ([{"prompt": "a", "images": []}], share_of_sevens, "column 'images', but AsyncGRPO"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image", "image": None}]}]}],
            share_of_sevens,
            "images in its prompts, but AsyncGRPO",
        ),
        ([], None, "holds None"),
        ([], ["accuracy"], "holds 'accuracy'"),
    ],
)
def test_data_that_would_end_the_run_is_refused(checkpoint, tmp_path, dataset, reward, said):
    with pytest.raises(ConfigurationError, match=said):
        AsyncRollouts(checkpoint, settings_of(tmp_path), dataset, reward)


def test_weights_that_were_sent_begin_a_version_under_autocast_too(checkpoint, tmp_path):
    rollouts = rollouts_of(checkpoint, settings_of(tmp_path, bf16=True))
    generator = rollouts.generator
    generator.generate_batch([[5, 6, 7]], max_new_tokens=2)
    rollouts.pause()
    rollouts.send_weights(iter(generator.manager.model.named_parameters()))
    rollouts.resume()
    rollouts.update_model_version(1)
    (output,) = generator.generate_batch([[5, 6, 7]], max_new_tokens=2).values()
    assert output.policy_versions == [(1, 2)]
    rollouts.stop()


def test_weights_of_another_model_are_refused(checkpoint, tmp_path):
    rollouts = rollouts_of(checkpoint, settings_of(tmp_path))
    with pytest.raises(WeightSyncError, match=r"sends lm_head.weight \(3, 3\)"):
        rollouts.send_weights(iter([("lm_head.weight", torch.zeros(3, 3))]))
    with pytest.raises(queue.Empty):
        rollouts.rollout_buffer.get_nowait()
    rollouts.stop()


@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_is_attention_along_each_path(window):
    torch.manual_seed(0)
    # A root of 3 tokens, with branches of 2 and 4.
    query = torch.randn(1, 4, 9, 8, requires_grad=True)
    key, value = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    paths = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8]]
    output, _ = plain_tree_attention(
        torch.nn.Module(), query, key, value, None,
        tree_kv_index=torch.tensor([place for path in paths for place in path]),
        tree_cu_seqlens_q=torch.tensor([0, 3, 5, 9], dtype=torch.int32),
        tree_cu_seqlens_k=torch.tensor([0, 3, 8, 15], dtype=torch.int32),
        tree_max_seqlen_q=4, tree_max_seqlen_k=7, sliding_window=window,
    )  # fmt: skip
    for path in paths:
        length = len(path)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, path], key[:, :, path], value[:, :, path], attn_mask=mask, enable_gqa=True
        )
        assert torch.allclose(output[:, path], expected.transpose(1, 2), atol=1e-6)
    output.sum().backward()
    assert query.grad.isfinite().all()


def test_a_reward_that_writes_into_its_lists_writes_into_no_sample():
    output = GenerationOutput("a", [3, 4], [5, 6, 7], [-0.5] * 3, policy_versions=[(0, 3)])

    def cuts(completion_ids, **_):
        for ids in completion_ids:
            ids.pop()
        return [1.0 for _ in completion_ids]

    assert summed_rewards([cuts], {"prompt": "p"}, [output], ["text"]) == [1.0]
    assert output.generated_tokens == [5, 6, 7]
