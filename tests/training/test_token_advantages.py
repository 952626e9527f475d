"""Advantages of single tokens: of turns, and of branches."""

import pytest
import torch
from datasets import Dataset
from playback import TOOLS, double, with_tools
from tiny_trainer import logged, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach, detach, make_rollout_func

CHECKED = {"verify_every_steps": 1, "max_logprob_drift": 1e-4}


def trained(output_dir, hook, config=None, **settings):
    trainer = tiny_trainer(output_dir, **({"optim": "sgd"} | settings))
    attach(trainer, RolloutConfig(**(CHECKED | (config or {}))), token_advantages=hook)
    trainer.train()
    detach(trainer)
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def spread(rows, advantages):
    """Each token has its row's advantage."""
    width = max(len(row.completion_ids) for row in rows)
    return advantages[:, None].expand(-1, width)


def test_a_rows_own_advantage_for_each_token_changes_nothing(tmp_path):
    plain, hooked = trained(tmp_path, None), trained(tmp_path, spread)
    assert logged(hooked, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)
    torch.testing.assert_close(weights(hooked), weights(plain), atol=1e-6, rtol=1e-5)


def by_turn(rows, advantages):
    """Only the first turn has the row's advantage; later ones half of it, turned around."""
    width = max(len(row.completion_ids) for row in rows)
    by_token = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        for turn, tokens in enumerate(row.turns):
            factor = 1.0 if turn == 0 else -0.5
            by_token[number, tokens.start : tokens.stop] = factor * advantages[number]
    return by_token


@pytest.mark.slow
def test_advantages_by_turn_are_those_of_the_trainers_own_forward(tmp_path, monkeypatch):
    chats = [{"prompt": [{"role": "user", "content": f"{n} is what?"}]} for n in range(32)]
    settings = TOOLS | {
        "trainer_arguments": {"tools": [double], "train_dataset": Dataset.from_list(chats)},
        "prepare_tokenizer": lambda tokenizer: with_tools(monkeypatch, tokenizer),
        "reward": lambda completions, **_: [float(len(str(c)) % 3) for c in completions],
    }
    turns = []

    def kept(rows, advantages):
        turns.extend(len(row.turns) for row in rows)
        assert all(all(row.is_sampled[t] for t in tokens) for row in rows for tokens in row.turns)
        return by_turn(rows, advantages)

    packed, own, plain = (
        trained(tmp_path, hook, {"loss_forward": forward}, **settings)
        for hook, forward in ((kept, "packed"), (by_turn, "trainer"), (None, "trainer"))
    )
    assert max(turns) >= 2
    assert logged(packed, "loss") == pytest.approx(logged(own, "loss"), abs=1e-5)
    torch.testing.assert_close(weights(packed), weights(own), atol=1e-6, rtol=1e-4)
    assert not torch.allclose(weights(own), weights(plain), atol=1e-6, rtol=1e-4)


def test_branches_of_a_rollout_func_are_rows_of_the_engine(tmp_path):
    generate, contexts = make_rollout_func(), []

    def branching(prompts, trainer):
        first = generate(prompts[::2], trainer)
        ids, tokens, logprobs = (first[n] for n in ("prompt_ids", "completion_ids", "logprobs"))
        forks = [len(completion) // 2 for completion in tokens]
        begun = [p + t[:at] for p, t, at in zip(ids, tokens, forks, strict=True)]
        second = generate(begun, trainer)
        rows = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for n, at in enumerate(forks):
            rows["prompt_ids"] += [ids[n], ids[n]]
            rows["completion_ids"] += [tokens[n], tokens[n][:at] + second["completion_ids"][n]]
            rows["logprobs"] += [logprobs[n], logprobs[n][:at] + second["logprobs"][n]]
        return rows

    def kept(rows, advantages):
        contexts.append(rows)
        return spread(rows, advantages)

    trainer = trained(tmp_path, kept, trainer_arguments={"rollout_func": branching})
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    for version, rows in enumerate(contexts, 1):
        for row in rows:
            assert set(row.versions) == {version}
            assert row.request_id is not None
            assert row.finish_reason is not None


def test_what_is_no_advantage_of_a_token_is_refused(tmp_path):
    for hook, found in (
        (lambda _, advantages: advantages, r"torch.Size\(\[16\]\)"),
        (lambda *_: None, "NoneType"),
        (lambda rows, _: torch.zeros(len(rows), 1), r"torch.Size\(\[16, 1\]\)"),
    ):
        with pytest.raises(ConfigurationError, match=f"returned {found}; return a tensor"):
            trained(tmp_path, hook)
    rloo = tiny_trainer(tmp_path, trainer_class=RLOOTrainer, config_class=RLOOConfig)
    with pytest.raises(ConfigurationError, match="token_advantages does not work with RLOOTrainer"):
        attach(rloo, token_advantages=spread)
