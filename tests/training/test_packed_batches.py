"""The packed loss of random batches is TRL's own, and a fault in it would be seen.

Each batch is one that TRL could have made: groups of random lengths and sizes, or turns and forks
of conversations, left-padded prompts, right-padded completions, rows without an advantage, rows and
tokens that are masked.
"""

import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import accelerate
import pytest
import torch
from prefix_trees import random_tree_rows
from tiny import PAD
from tiny_trainer import tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.integrations.trl import packed_loss
from cb_rollout.integrations.trl.rows.loss_rows import LossBatch
from cb_rollout.integrations.trl.scoring import TrainerScoring
from measure.tree import batch_of, conversations, sharing_prompts_alone

VOCABULARY = 99
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A trainer that packs and one that is TRL's own, of equal weights that never change."""
    settings = {"num_hidden_layers": 1, "vllm_importance_sampling_correction": False}
    ours, theirs = (tiny_trainer(tmp_path_factory.mktemp("runs"), **settings) for _ in range(2))
    generator = attach(ours, RolloutConfig(loss_forward="packed"))
    for trainer in (ours, theirs):
        trainer.model.train()
        # Rows of one prompt have equal first entropies, which rounding puts in any order.
        own = trainer.get_high_entropy_mask
        trainer.get_high_entropy_mask = partial(ties_stay_ties, own)
    yield SimpleNamespace(ours=ours, theirs=theirs)
    generator.close()


def ties_stay_ties(own_mask, entropies, *rest):
    return own_mask(entropies.round(decimals=3), *rest)


@pytest.fixture(autouse=True)
def nothing_falls_back(monkeypatch):
    """What is compared here is the packed forward, even one that the first batch would refuse."""
    monkeypatch.setattr(packed_loss.PackedLoss, "_is_proved", lambda *_: True)


def random_batch(rng):
    """Inputs of TRL's loss, as its `_generate_and_score_completions` makes them."""

    def tokens(least, most):
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(least, most))]

    prompts = [tokens(1, 8) for _ in range(rng.randint(1, 3))]
    longest = rng.choice([1, 4, 10])
    rows = [(p, tokens(0, longest)) for p in prompts for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.5:
        # Turns and forks of conversations.
        rows = random_tree_rows(rng, VOCABULARY)
    rng.shuffle(rows)
    P = max(len(prompt) for prompt, _ in rows)
    T = max(1, *(len(completion) for _, completion in rows))
    shape = (len(rows), T)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    share = rng.choice([0.0, 0.5, 0.5, 1.0])
    advantages = torch.randn(len(rows), generator=generator)
    is_left_out = torch.rand(len(rows), generator=generator) < share
    # A masked row keeps its tokens, as where TRL leaves truncated completions out.
    under_mask = torch.randint(3, VOCABULARY, shape, generator=generator).tolist()
    mask = torch.tensor([[t < len(c) for t in range(T)] for _, c in rows]).long()
    batch = {
        "prompt_ids": torch.tensor([[PAD] * (P - len(p)) + p for p, _ in rows]),
        "prompt_mask": torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p, _ in rows]),
        "completion_ids": torch.tensor(
            [c + rest[len(c) :] for (_, c), rest in zip(rows, under_mask, strict=True)]
        ),
        "completion_mask": mask,
        "advantages": advantages.masked_fill(is_left_out, 0.0),
        "num_items_in_batch": mask.sum(),
    }
    if rng.random() < 0.5:
        batch["tool_mask"] = torch.randint(0, 2, shape, generator=generator)
    if rng.random() < 0.5:
        near = torch.randn(shape, generator=generator) * 0.1
        batch["old_per_token_logps"] = near - 4
    batch["ref_per_token_logps"] = torch.randn(shape, generator=generator) * 0.1 - 4
    return batch


def random_settings(rng):
    bonus = rng.choice([0.0, 0.0, 0.02])
    return {
        "loss_type": rng.choice(LOSSES),
        "beta": rng.choice([0.0, 0.0, 0.1]),
        "entropy_coef": bonus,
        "_entropy_bonus_enabled": bool(bonus),
        "top_entropy_quantile": rng.choice([1.0, 1.0, 0.4]),
        "importance_sampling_level": rng.choice(["token", "sequence"]),
    }


def learned(trainer, batches, settings):
    """The losses of some micro-batches, the gradient of their sum, and what was logged."""
    for name, value in settings.items():
        setattr(trainer, name, value)
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer._metrics["train"].clear()
    trainer.model.zero_grad()
    losses = []
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
        losses.append(loss.item())
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters()}
    return losses, gradients, {k: list(v) for k, v in trainer._metrics["train"].items()}


def scored(trainer, batch, rng):
    """Old or reference log-probabilities, and entropies, without gradients."""
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            batch["completion_ids"].shape[1],
            rng.choice([None, 1, 3]),
            compute_entropy=True,
        )[:2]


def difference(pair, seed):
    """What differs between the two trainers on this seed's batches; None: nothing does."""
    rng = random.Random(seed)
    limit = rng.choice(["auto", 1, 12, 40])
    config = RolloutConfig(loss_forward="packed", loss_tokens_per_forward=limit)
    scoring = pair.ours._get_per_token_logps_and_entropies.__self__
    scoring._packed = packed_loss.PackedLoss(pair.ours, config, packing_obstacle="")
    batches = [random_batch(rng) for _ in range(rng.randint(1, 2))]
    own, other = (scored(t, batches[0], random.Random(seed)) for t in (pair.ours, pair.theirs))
    if any((a - b).abs().max() > 10 * TOLERANCE for a, b in zip(own, other, strict=True)):
        return "scores"
    settings = random_settings(rng)
    own, other = (learned(trainer, batches, settings) for trainer in (pair.ours, pair.theirs))
    if own[0] != pytest.approx(other[0], rel=TOLERANCE, abs=TOLERANCE):
        return "losses"
    norm = max(float(gradient.norm()) for gradient in other[1].values())
    for name, gradient in other[1].items():
        if (own[1][name] - gradient).norm() > TOLERANCE * (gradient.norm() + norm) + 1e-7:
            return f"gradients of {name}"
    for name, values in other[2].items():
        if own[2][name] != pytest.approx(values, rel=10 * TOLERANCE, abs=1e-4, nan_ok=True):
            return f"metric {name}"
    return None


def test_random_batches_learn_what_trl_would(pair):
    assert {seed: found for seed in range(12) if (found := difference(pair, seed))} == {}


@pytest.mark.slow
def test_many_random_batches_learn_what_trl_would(pair):
    assert {seed: found for seed in range(12, 500) if (found := difference(pair, seed))} == {}


def packing(change):
    """A fault in the layout of a batch."""
    pack = packed_loss.pack

    def faulty(*arguments, **named):
        return [change(batch) for batch in pack(*arguments, **named)]

    return lambda monkeypatch: monkeypatch.setattr(packed_loss, "pack", faulty)


def shifted(batch):
    """A completion's positions begin one too late."""
    positions = batch.position_ids.clone()
    for segment in batch.segments:
        if segment.prefix:
            positions[0, segment.start : segment.start + segment.length] += 1
    return replace(batch, position_ids=positions)


def of_another_group(batch):
    """Completions attend to the first prompt of the batch."""
    return with_prefixes(batch, lambda prefix: (range(sum(map(len, prefix))),))


def with_prefixes(batch, change):
    """Segments that have a prefix get another one."""
    segments = tuple(s._replace(prefix=change(s.prefix)) if s.prefix else s for s in batch.segments)
    return replace(batch, segments=segments)


def with_a_key_too_many(batch):
    """Segments see the first token of the row that they leave."""
    return with_prefixes(batch, lambda own: (*own[:-1], range(own[-1].start, own[-1].stop + 1)))


def below_the_parent(batch):
    """Segments attend to the path of their parent's parent alone."""
    return with_prefixes(batch, lambda prefix: prefix[:-1])


def of_the_row_before(batch):
    """A row that shares a score has the next score in its place."""
    if batch.scores_R is None:
        return batch
    return replace(batch, scores_R=(batch.scores_R + 1) % len(batch.labels_K))


def with_a_token_too_early(batch):
    """Tokens are predicted from the one before the right one."""
    return replace(batch, predicting_K=(batch.predicting_K - 1).clamp(min=0))


def in_another_order(batch):
    """Scores are those of other rows of equal length."""
    if len(set(batch.lengths)) > 1:
        return batch
    return replace(batch, rows=batch.rows[::-1])


def padding_is_a_prompt(monkeypatch):
    rows = LossBatch.unpadded

    def faulty(batch):
        mask = batch.attention_mask.clone()
        mask[:, : -batch.logits_to_keep] = 1
        return rows(replace(batch, attention_mask=mask))

    monkeypatch.setattr(LossBatch, "unpadded", faulty)


def a_row_has_no_gradient(monkeypatch):
    chosen = packed_loss._rows_with_gradient
    monkeypatch.setattr(
        packed_loss, "_rows_with_gradient", lambda rows, advantages: chosen(rows, advantages)[:1]
    )


def rows_are_left_out_of_every_loss(monkeypatch):
    """Rows without an advantage are left out where the KL or the entropy bonus needs them."""
    monkeypatch.setattr(TrainerScoring, "_advantages", lambda self, inputs: inputs["advantages"])


def input_of_the_loss(change):
    """A fault that leaves something out of the batch."""

    def faulty(monkeypatch, pair):
        compute_loss = pair.ours.compute_loss
        monkeypatch.setattr(
            pair.ours,
            "compute_loss",
            lambda model, batch: compute_loss(model, batch | change(batch)),
        )

    return faulty


def without_their_tokens(batch):
    """Rows without an advantage are out of the denominator too."""
    return {"completion_mask": batch["completion_mask"] * (batch["advantages"] != 0)[:, None]}


def without_a_mask(batch):
    """A row's tokens all count."""
    return {"tool_mask": torch.ones_like(batch["completion_mask"])}


MUTANTS = {
    "position": packing(shifted),
    "prompt": packing(of_another_group),
    "key": packing(with_a_key_too_many),
    "parent": packing(below_the_parent),
    "score": packing(of_the_row_before),
    "prediction": packing(with_a_token_too_early),
    "order": packing(in_another_order),
    "padding": padding_is_a_prompt,
    "gradient": a_row_has_no_gradient,
    "kl": rows_are_left_out_of_every_loss,
}
FAULTY_INPUTS = {
    "denominator": input_of_the_loss(without_their_tokens),
    "mask": input_of_the_loss(without_a_mask),
}


@pytest.mark.fast_cases("prediction")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_the_packed_forward_is_seen(pair, monkeypatch, mutant):
    MUTANTS[mutant](monkeypatch)
    assert any(difference(pair, seed) for seed in range(12))


@pytest.mark.parametrize("mutant", FAULTY_INPUTS)
def test_something_left_out_of_the_loss_is_seen(pair, monkeypatch, mutant):
    FAULTY_INPUTS[mutant](monkeypatch, pair)
    assert any(difference(pair, seed) for seed in range(12))


A, B = [10, 11, 12], [13, 14]
BY_HAND = {
    "prompt_ids": torch.tensor([A, A, [PAD, *B], [PAD, *B]]),
    "prompt_mask": torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 1], [0, 1, 1]]),
    "completion_ids": torch.tensor(
        [[20, 21, PAD, PAD], [22, 23, 24, 25], [26, 27, 28, PAD], [29, 30, 31, 32]]
    ),
    # The last row is masked, as where TRL leaves truncated completions out.
    "completion_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]),
    "advantages": torch.tensor([1.0, 0.0, -1.0, 1.0]),
    "num_items_in_batch": torch.tensor(9),
    "ref_per_token_logps": torch.zeros(4, 4),
}


def use(trainer, settings=None, **config):
    """Have a trainer pack anew, with these settings."""
    scoring = trainer._get_per_token_logps_and_entropies.__self__
    config = RolloutConfig(loss_forward="packed", **config)
    scoring._packed = packed_loss.PackedLoss(trainer, config, packing_obstacle="")
    plain = {"beta": 0.0, "entropy_coef": 0.0, "_entropy_bonus_enabled": False}
    plain |= {"loss_type": "dapo", "top_entropy_quantile": 1.0}
    return plain | (settings or {})


@pytest.mark.parametrize(
    ("settings", "config", "counts", "num_forwards"),
    [
        # Rows 0 and 2 alone, 4 tokens each; row 1 without a gradient, 6.
        ({}, {}, (14, 11, 0, 2), 2),
        # Every row has a gradient: prompt A, 1 and 3 tokens; row 2 alone. Only row 3 is out.
        ({"beta": 0.1}, {}, (11, 11, 1, 1), 1),
        # Each row alone: the prompt is computed twice, and each forward again.
        ({"beta": 0.1}, {"loss_tokens_per_forward": 6}, (14, 11, 0, 1), 3 + 3),
    ],
    ids=["advantages", "kl", "cut"],
)
def test_the_counts_are_those_made_by_hand(pair, settings, config, counts, num_forwards):
    settings = use(pair.ours, settings, **config)
    calls = []
    inside = pair.ours.model.model.layers[0].input_layernorm
    handle = inside.register_forward_pre_hook(lambda *_: calls.append(1))
    logged = learned(pair.ours, [BY_HAND], settings)[2]
    handle.remove()
    assert len(calls) == num_forwards
    names = ("loss_tokens_computed", "loss_tokens_useful", "prompts_shared", "rows_left_out")
    assert tuple(logged[f"rollout/{name}"][0] for name in names) == counts


def test_conversations_of_eight_turns_in_a_group_of_eight_are_computed_as_a_tree(pair):
    rows = conversations(random.Random(0), (6, 3, 2), 2, VOCABULARY)
    paths = [(*prompt, *answer[:-1]) for prompt, answer in rows]
    needed = len({path[:n] for path in paths for n in range(1, len(path) + 1)})
    batch = batch_of(rows) | {"ref_per_token_logps": torch.zeros(64, 3)}
    settings = use(pair.ours)
    own, other = (learned(trainer, [batch], settings) for trainer in (pair.ours, pair.theirs))
    assert own[0] == pytest.approx(other[0], rel=TOLERANCE, abs=TOLERANCE)
    norm = max(float(gradient.norm()) for gradient in other[1].values())
    for name, gradient in other[1].items():
        assert (own[1][name] - gradient).norm() <= TOLERANCE * (gradient.norm() + norm), name
    assert own[2]["rollout/loss_tokens_computed"] == [needed]
    assert own[2]["rollout/loss_tokens_useful"] == [needed]
    with sharing_prompts_alone():
        computed = learned(pair.ours, [batch], settings)[2]["rollout/loss_tokens_computed"][0]
    assert computed > 4 * needed


def likelihood(trainer, model, inputs):
    """A loss without advantages."""
    logprobs_BT, _, _ = trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        inputs["completion_ids"].shape[1],
    )
    return -(logprobs_BT * inputs["completion_mask"]).sum()


def test_a_loss_of_the_users_own_trains_rows_without_an_advantage(pair, monkeypatch):
    monkeypatch.setattr(type(pair.ours), "_compute_loss", likelihood)
    settings = use(pair.ours)
    own, other = (learned(t, [BY_HAND], settings) for t in (pair.ours, pair.theirs))
    for name, gradient in other[1].items():
        assert (own[1][name] - gradient).norm() <= TOLERANCE * gradient.norm() + 1e-6, name


def test_what_surrounds_trls_loss_may_train_rows_without_an_advantage(pair, monkeypatch):
    scoring = pair.ours._get_per_token_logps_and_entropies.__self__
    compute_loss = scoring._compute_loss
    monkeypatch.setattr(scoring, "_compute_loss", lambda *args: 2 * compute_loss(*args))
    logged = learned(pair.ours, [BY_HAND], use(pair.ours))[2]
    # The masked one alone.
    assert logged["rollout/rows_left_out"] == [1]


def test_the_trainers_own_forward_is_counted_too(pair):
    use(pair.ours)
    scoring = pair.ours._get_per_token_logps_and_entropies.__self__
    scoring._packed = None
    logged = learned(pair.ours, [BY_HAND], {"beta": 0.0, "loss_type": "dapo"})[2]
    assert logged["rollout/loss_tokens_computed"] == [4 * (3 + 4)]
    assert logged["rollout/loss_tokens_useful"] == [11]
    assert logged["rollout/rows_left_out"] == logged["rollout/prompts_shared"] == [0]


def test_padding_in_the_midst_is_left_to_the_trainer(pair):
    settings = use(pair.ours)
    with_a_hole = dict(BY_HAND, completion_mask=BY_HAND["completion_mask"].clone())
    with_a_hole["completion_mask"][1, 1] = 0
    logged = learned(pair.ours, [with_a_hole, BY_HAND], settings)[2]
    # The next batch is packed again.
    assert logged["rollout/loss_tokens_computed"] == [28, 14]


def test_a_batch_with_other_inputs_switches_packing_off(pair):
    settings = use(pair.ours)
    zeros = torch.zeros(4, 7, dtype=torch.long)
    with_types = BY_HAND | {"token_type_ids": zeros, "mm_token_type_ids": zeros}
    said = r"is switched off \(the batch has token_type_ids, mm_token_type_ids\)"
    with pytest.warns(UserWarning, match=said) as caught:
        learned(pair.ours, [with_types, BY_HAND, with_types], settings)
    assert len(caught) == 1
    assert pair.ours._metrics["train"]["rollout/loss_tokens_computed"] == [28, 28, 28]


def test_on_a_gpu_a_loss_that_is_padded_says_why(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, num_hidden_layers=1)
    given = (trainer, RolloutConfig(loss_forward="packed"))
    monkeypatch.setattr(packed_loss, "shards_models", lambda _: True)
    # A warning is an error.
    packed_loss.PackedLoss(*given, packing_obstacle="recurrent states")
    device = torch.device("cuda", 0)
    monkeypatch.setattr(accelerate.Accelerator, "device", property(lambda self: device))
    packed_loss.PackedLoss(*given, packing_obstacle="")
    with pytest.warns(UserWarning, match=r"prompts cannot be shared \(recurrent states") as caught:
        packed_loss.PackedLoss(*given, packing_obstacle="recurrent states")
    assert len(caught) == 1
