"""Tools and environments of a stock AsyncGRPOTrainer, whose turns the engine samples."""

import threading
import time
from typing import ClassVar

import pytest
import trl.experimental.async_grpo.async_rollout_worker as trl_worker
from datasets import Dataset
from playback import TOOL_TEMPLATE, Counter, double, parse_any_letter_as_a_call
from test_async_grpo import checkpoint, settings_of  # noqa: F401  a fixture
from tiny import char_tokenizer, plain_logprobs, tiny_model
from trl.experimental.async_grpo import AsyncGRPOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, RolloutError
from cb_rollout.integrations.async_grpo import AsyncRollouts

CHATS = [{"prompt": [{"role": "user", "content": f"{n} is what?"}]} for n in range(6)]
SETTINGS = {"max_completion_length": 6, "max_tool_calling_iterations": 2, "max_steps": 3}


def length(completions, **_):
    return [float(len(str(completion)) % 5) for completion in completions]


def tool_tokenizer(monkeypatch):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = "parsed by the test"
    monkeypatch.setattr(trl_worker, "parse_response", parse_any_letter_as_a_call)
    monkeypatch.setattr(trl_worker, "is_chat_template_prefix_preserving", lambda _: True)
    return tokenizer


class Kept(AsyncRollouts):
    """Keeps each sample as the trainer takes it, and each version's weights."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.taken, self.policies = [], {}

    def _report_age(self, sample):
        super()._report_age(sample)
        self.taken.append(sample)

    def update_model_version(self, model_version):
        super().update_model_version(model_version)
        policy = tiny_model(vocab_size=99)
        policy.load_state_dict(self.generator.manager.model.state_dict())
        self.policies[model_version] = policy


def trained(checkpoint, tokenizer, args, rollouts):  # noqa: F811
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=args,
        train_dataset=Dataset.from_list(CHATS),
        processing_class=tokenizer,
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    trainer.train()
    return trainer


def rollouts_of(checkpoint, args, tokenizer, reward=length, **settings):  # noqa: F811
    return Kept(
        checkpoint,
        args,
        settings.pop("train_dataset", Dataset.from_list(CHATS)),
        reward,
        processing_class=tokenizer,
        config=settings.pop("config", RolloutConfig()),
        **settings,
    )


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_conversations_are_trained_on(checkpoint, tmp_path, monkeypatch, kind):  # noqa: F811
    tokenizer = tool_tokenizer(monkeypatch)
    args = settings_of(tmp_path, **SETTINGS)
    given = {"tools": [double]} if kind == "tools" else {"environment_factory": Counter}
    rollouts = rollouts_of(checkpoint, args, tokenizer, length if kind == "tools" else [], **given)
    trainer = trained(checkpoint, tokenizer, args, rollouts)
    assert trainer.state.global_step == 3
    assert not rollouts.generator.manager.is_running()
    several = [s for s in rollouts.taken if "010" in turns_of(s)]
    assert several
    for sample in several:
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        start = mask.index(1)
        runs = [version for version, count in sample.token_versions for _ in range(count)]
        assert len(runs) == sum(mask)
        assert sample.model_version == min(runs)
        expected = {
            version: plain_logprobs(rollouts.policies[version], ids[:start], ids[start:])
            for version in set(runs)
        }
        versions = iter(runs)
        found = sample.old_log_probs.tolist()[start:]
        for place, (sampled, is_trained) in enumerate(zip(found, mask[start:], strict=True)):
            wanted = expected[next(versions)][place] if is_trained else 0
            assert sampled == pytest.approx(wanted, abs=1e-5)
    # A later turn reads the keys of the turns before.
    assert rollouts.generator.manager.counters.prefill_tokens_saved > 0
    # What TRL's trainer would log of its own worker.
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert logs[0]["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert any(log.get("rollout/turns_mean", 0) > 1 for log in logs)


def turns_of(sample) -> str:
    """The mask without repetition: "01" is one turn, "0101" two."""
    digits = "".join(map(str, sample.completion_mask.tolist()))
    return "".join(d for n, d in enumerate(digits) if not n or d != digits[n - 1])


def test_a_tool_that_hangs_or_raises_costs_its_own_conversation(checkpoint, tmp_path, monkeypatch):  # noqa: F811
    released, called, starts = threading.Event(), [], []

    def work(number: int) -> int:
        """Works, or not.

        Args:
            number: any.

        Returns:
            The same.
        """
        called.append(number)
        starts.append(time.monotonic())
        if len(called) % 3 == 1:
            raise ValueError("no such number")
        if len(called) % 3 == 2:
            released.wait(60)
        return number

    tokenizer = tool_tokenizer(monkeypatch)
    args = settings_of(tmp_path, **(SETTINGS | {"max_steps": 2}))
    config = RolloutConfig(tool_timeout_seconds=0.3)
    rollouts = rollouts_of(checkpoint, args, tokenizer, tools=[work], config=config)
    started = time.monotonic()
    trainer = trained(checkpoint, tokenizer, args, rollouts)
    assert trainer.state.global_step == 2
    assert time.monotonic() - started < 50
    released.set()
    # While a call hangs, other conversations call theirs.
    assert any(0 < later - start < 0.3 for start in starts[1::3] for later in starts)
    said = [m["content"] for s in rollouts.taken for m in s.completion if m["role"] == "tool"]
    assert any("no such number" in text for text in said)
    assert any("tool_timeout_seconds=0.3" in text for text in said)


class Stuck:
    """An environment whose tool hangs the first time that it is called anywhere."""

    made: ClassVar[list["Stuck"]] = []
    released: ClassVar[threading.Event] = threading.Event()
    hung: ClassVar[list["Stuck"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.num_resets = 0

    def reset(self, **_):
        self.num_resets += 1

    def wait(self, number: int) -> int:
        """Waits.

        Args:
            number: any.

        Returns:
            The same.
        """
        if not self.hung:
            self.hung.append(self)
            self.released.wait(60)
        return number


def test_an_environment_in_which_a_call_still_runs_is_not_used_again(
    checkpoint,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    tokenizer = tool_tokenizer(monkeypatch)
    args = settings_of(tmp_path, **SETTINGS)
    config = RolloutConfig(tool_timeout_seconds=0.3)
    rollouts = rollouts_of(checkpoint, args, tokenizer, environment_factory=Stuck, config=config)
    trainer = trained(checkpoint, tokenizer, args, rollouts)
    Stuck.released.set()
    assert trainer.state.global_step == 3
    (hung,) = Stuck.hung
    assert hung.num_resets == 1
    assert any(environment.num_resets > 1 for environment in Stuck.made)


@pytest.mark.slow
def test_conversations_that_all_hang_are_reported(checkpoint, tmp_path, monkeypatch):  # noqa: F811
    released = threading.Event()

    def wait(number: int) -> int:
        """Waits.

        Args:
            number: any.

        Returns:
            The same.
        """
        released.wait(60)
        return number

    tokenizer = tool_tokenizer(monkeypatch)
    args = settings_of(tmp_path, **SETTINGS, heartbeat_stale_after_s=2)
    rollouts = rollouts_of(checkpoint, args, tokenizer, tools=[wait])
    with pytest.raises(RolloutError, match="heartbeat_stale_after_s=2"):
        trained(checkpoint, tokenizer, args, rollouts)
    released.set()


@pytest.mark.slow
def test_what_cannot_be_is_refused(checkpoint, tmp_path, monkeypatch):  # noqa: F811
    from cb_rollout.strategies import DynamicSampling

    tokenizer = tool_tokenizer(monkeypatch)
    args = settings_of(tmp_path, **SETTINGS)
    with pytest.raises(ConfigurationError, match="leave strategy out"):
        rollouts_of(checkpoint, args, tokenizer, tools=[double], strategy=DynamicSampling())
    texts = Dataset.from_list([{"prompt": "1+1="}] * 4)
    rollouts = rollouts_of(checkpoint, args, tokenizer, tools=[double], train_dataset=texts)
    with pytest.raises(Exception, match="make each one a chat") as caught:
        trained(checkpoint, tokenizer, args, rollouts)
    assert isinstance(caught.value, RolloutError | RuntimeError)
