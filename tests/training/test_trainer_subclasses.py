"""A trainer class of one's own drops, sorts, repeats, replays or cuts rows: each keeps its record.

Losses and gradients are compared with those of TRL's own path on the same batch. Nothing is
learned (the learning rate is 0), so that the model's top-k and experts are those of any rollout.
"""

import json
from collections import defaultdict

import pytest
import torch
from nightly import some_slow, some_slow_pairs
from playback import watched
from tiny import EOS, tiny_model
from tiny_trainer import logged, tiny_trainer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach
from cb_rollout.integrations.trl.rows.loss_rows import ROW_IDS, ROWS_KEY

TOP_K = 5

# Tokens that end a completion, so that lengths differ.
ENDS = [EOS, *range(20, 28)]
SMALL = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 10,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.0,
}


def of_rows(batch, numbers):
    """The rows of a batch at `numbers`."""
    return {name: value[numbers] if value.dim() else value for name, value in batch.items()}


def joined(first, second, pad_token_id=0):
    """The rows of two batches, with as much padding as the wider one."""
    batch = {}
    # In the order of the first: TRL takes the number of rows from the first column.
    for name in first:
        if name not in second:
            continue
        parts = [first[name], second[name]]
        if parts[0].dim() == 0:
            batch[name] = parts[0]
            continue
        if parts[0].dim() == 2:
            width = max(part.shape[1] for part in parts)
            fill = pad_token_id if name.endswith("_ids") else 0
            for index, part in enumerate(parts):
                missing = width - part.shape[1]
                sides = (missing, 0) if name.startswith("prompt") else (0, missing)
                parts[index] = torch.nn.functional.pad(part, sides, value=fill)
        batch[name] = torch.cat(parts)
    return batch


def with_old_logps(trainer, batch):
    """RLOO's sums of old log-probabilities are of the tokens that are left."""
    if "old_logps" in batch:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        width = batch["completion_ids"].shape[1]
        with torch.no_grad():
            logprobs, *_ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, width
            )
        batch["old_logps"] = (logprobs * batch["completion_mask"]).sum(1)
    return batch


class Drops:
    def change(self, batch, _):
        return of_rows(batch, [1, 2, 5, 7])


class Sorts:
    def change(self, batch, _):
        return of_rows(batch, batch["completion_mask"].sum(1).argsort(descending=True, stable=True))


class Repeats:
    def change(self, batch, _):
        return of_rows(batch, [6, 6, 1, 3, 6, 0, 1, 2])


class Replays:
    """Half of each batch are rows of the one before."""

    def change(self, batch, _):
        earlier, self.buffer = getattr(self, "buffer", batch), batch
        return joined(of_rows(batch, [7, 0, 3, 5]), of_rows(earlier, [2, 6, 4, 1]))


class ReplaysKnownColumns:
    """Rows from a buffer, by the names of TRL's columns alone."""

    def change(self, batch, _):
        batch = {name: value for name, value in batch.items() if name != ROW_IDS}
        return Replays.change(self, batch, _)


class GeneratesTwice:
    def change(self, batch, more):
        return joined(of_rows(batch, [3, 1, 0, 2]), of_rows(more(), [7, 5, 6, 4]))


class Cuts:
    """Completions end after four tokens, or two."""

    def change(self, batch, _):
        lengths = torch.tensor([4, 2] * 4)
        at = torch.arange(batch["completion_ids"].shape[1])
        batch["completion_mask"] = batch["completion_mask"] * (at < lengths[:, None])
        batch = of_rows(batch, list(range(7, -1, -1)))
        for name, value in batch.items():
            if value.dim() == 2 and not name.startswith("prompt"):
                batch[name] = value[:, :4]
        return with_old_logps(self, batch)


class Masks:
    """The loss skips completions from the sixth token on, and one row; their ids stay."""

    def change(self, batch, _):
        batch["completion_mask"][:, 5:] = 0
        batch["completion_mask"][5] = 0
        return with_old_logps(self, of_rows(batch, [5, 4, 7, 6, 1, 0, 3, 2]))


class KeepsShortest:
    """As GFPO: the two shortest of each group, with an advantage of their own."""

    def change(self, batch, _):
        lengths = batch["completion_mask"].sum(1).view(-1, 4)
        kept = lengths.argsort(dim=1, stable=True)[:, :2]
        kept = kept + 4 * torch.arange(len(lengths))[:, None]
        batch = of_rows(batch, kept.flatten())
        advantages = batch["advantages"].view(-1, 2)
        batch["advantages"] = (advantages - advantages.mean(1, keepdim=True) + 0.1).flatten()
        return batch


CHANGES = {
    change.__name__: change
    for change in (
        *(Drops, Sorts, Repeats, Replays, ReplaysKnownColumns, GeneratesTwice, Cuts, Masks),
        KeepsShortest,
    )
}


def class_that(change, base):
    class Changed(change, base):
        def _generate_and_score_completions(self, inputs):
            score = super()._generate_and_score_completions
            return self.change(score(inputs), lambda: score(inputs))

    return Changed


class GeneratesInOtherOrder:
    """Rows are sorted, and cut, before TRL scores them."""

    def _generate(self, prompts):
        generated = list(super()._generate(prompts))
        order = sorted(range(len(prompts)), key=lambda n: len(generated[1][n]))
        for index, column in enumerate(generated):
            if isinstance(column, list) and len(column) == len(prompts):
                generated[index] = [column[n] for n in order]
        generated[1] = [ids[:6] for ids in generated[1]]
        if len(generated) > 3:
            generated[4] = [values[:6] for values in generated[4]]
        return tuple(generated)


def plain_scores(model, ids, mask, logits_to_keep, top_k, temperature=1.0):
    """Log-probabilities and entropies of completions, over the most likely tokens alone."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -logits_to_keep - 1 : -1]
    logits = logits.float() / temperature
    labels = ids[:, -logits_to_keep:, None]
    if top_k:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept.scatter_(2, logits.topk(top_k).indices, True)
        # Padding, and what was replaced by it.
        kept.scatter_(2, labels, True)
        logits = logits.masked_fill(~kept, -1e9)
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(2, labels)[..., 0], entropies, None


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def remainder(completions, **_):
    """A reward that hardly two completions share."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def model_of(family):
    experts = {"num_experts": 16, "num_experts_per_tok": 4} if family == "qwen3_moe" else {}
    model = tiny_model(family, vocab_size=99, num_hidden_layers=1, **experts)
    model.generation_config.eos_token_id = ENDS
    return model


def trained(output_dir, trainer_class, config, family="qwen3", **settings):
    """Batches that an attached trainer trained on, and what it learned from them."""
    torch.manual_seed(0)
    trainer = tiny_trainer(
        output_dir,
        trainer_class=trainer_class,
        model=model_of(family),
        reward=remainder,
        config_class=RLOOConfig if issubclass(trainer_class, RLOOTrainer) else GRPOConfig,
        **(SMALL | settings),
    )
    config = {
        "verify_every_steps": 1,
        "max_logprob_drift": 1e-4,
        "record_num_sequences": 8,
    } | config
    generator = attach(trainer, RolloutConfig(**config))
    record, compute_loss, batches = watched(trainer), trainer.compute_loss, []

    def keep(model, inputs, *rest, **named):
        batches.append(inputs)
        return compute_loss(model, inputs, *rest, **named)

    trainer.compute_loss = keep
    try:
        trainer.train()
    finally:
        generator.close()
    return trainer, record, batches


def assert_learned_as_trl_would(trainer, record, batches, family):
    """Compare each loss and gradient with those of a trainer that is not attached."""
    model = model_of(family).train()
    args = trainer.args
    other = type(trainer)(
        model=model,
        reward_funcs=remainder,
        args=args,
        processing_class=trainer.processing_class,
        train_dataset=trainer.train_dataset,
    )
    other.use_vllm = True  # So that the loss takes the ratios of the batch.
    other.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    if args.top_k:

        def scores(model, ids, mask, logits_to_keep, *_, **__):
            return plain_scores(model, ids, mask, logits_to_keep, args.top_k)

        other._get_per_token_logps_and_entropies = scores
    assert len(batches) == len(record.losses) > 0
    for inputs, loss, gradient in zip(batches, record.losses, record.gradients, strict=True):
        model.zero_grad()
        tensors = {n: v for n, v in inputs.items() if n not in (ROWS_KEY, ROW_IDS)}
        expected = other._compute_loss(model, tensors)
        expected.backward()
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        assert norm > 0
        found = gradients(model)
        assert found.keys() == gradient.keys()
        size = max(float(g.abs().max()) for g in found.values())
        for name, value in gradient.items():
            assert (value - found[name]).abs().max() <= 1e-4 * max(1, size), name


def assert_recorded_by_row(trainer, output_dir, batches):
    """Each line of a run's records holds the numbers of one row."""
    path = next((output_dir / "cb_rollout").rglob("rollouts.jsonl"))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records
    advantages = defaultdict(list)
    for step, inputs in enumerate(batches, 1):
        rows = zip(inputs[ROWS_KEY], inputs["advantages"].tolist(), strict=True)
        for row, advantage in rows:
            advantages[step, row.request_id].append(advantage)
    for record in records:
        kept = [n for n, own in enumerate(record["mask"]) if own]
        pairs = [(record["logprobs"][n], record["trainer_logprobs"][n]) for n in kept]
        assert all(ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in pairs)
        own = advantages[record["step"], record["request_id"]]
        assert any(record["advantage"] == pytest.approx(value, abs=1e-6) for value in own)


CONFIGS = {
    "plain": ({}, {}),
    "recomputed": ({"old_logps": "trainer", "loss_forward": "trainer"}, {}),
    "sampled": ({"old_logps": "rollout"}, {"num_iterations": 2, "max_steps": 4}),
    "uncorrected": ({"old_logps": "rollout"}, {"vllm_importance_sampling_correction": False}),
    "untouched": ({}, {"vllm_importance_sampling_correction": False}),
    "masks": ({"sampling_mask": "replay"}, {"top_k": TOP_K}),
    "padded masks": ({"sampling_mask": "replay", "loss_forward": "trainer"}, {"top_k": TOP_K}),
    "experts": ({"router_replay": True}, {}),
    "padded experts": ({"router_replay": True, "loss_forward": "trainer"}, {}),
}
QUICK = [("Sorts", "masks"), ("Drops", "untouched"), ("Replays", "experts")]
CELLS = list(some_slow_pairs(list(CHANGES), list(CONFIGS), QUICK, every=5))


def assert_trains_its_own_rows(output_dir, trainer_class, name):
    config, settings = CONFIGS[name]
    family = "qwen3_moe" if "experts" in name else "qwen3"
    run = trained(output_dir, trainer_class, config, family, **settings)
    assert_learned_as_trl_would(*run, family)
    trainer, _, batches = run
    if "num_iterations" not in settings:
        assert_recorded_by_row(trainer, output_dir, batches)
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-4
    assert set(logged(trainer, "rollout/router_disagreement")) <= {0}
    return batches


@pytest.mark.parametrize(("change", "config"), CELLS)
def test_rows_that_a_class_changed_are_trained_with_their_own_records(tmp_path, change, config):
    trainer_class = class_that(CHANGES[change], GRPOTrainer)
    assert_trains_its_own_rows(tmp_path, trainer_class, config)


RLOO_CONFIGS = ("plain", "recomputed", "masks", "padded masks", "experts")


@pytest.mark.parametrize(
    ("change", "config"), list(some_slow_pairs(list(CHANGES), RLOO_CONFIGS, every=5))
)
def test_rows_of_rloo_are_trained_with_their_own_records(tmp_path, change, config):
    trainer_class = class_that(CHANGES[change], RLOOTrainer)
    assert_trains_its_own_rows(tmp_path, trainer_class, config)


@pytest.mark.parametrize("config", some_slow(CONFIGS, every=3))
@pytest.mark.parametrize("base", [GRPOTrainer, RLOOTrainer])
def test_rows_that_were_changed_before_the_scoring_are_found_by_their_tokens(
    tmp_path, base, config
):
    if base is RLOOTrainer and config not in RLOO_CONFIGS:
        pytest.skip("GRPO's setting")

    class Changed(GeneratesInOtherOrder, base):
        pass

    assert_trains_its_own_rows(tmp_path, Changed, config)


STOCK_SCORING = GRPOTrainer._generate_and_score_completions


class Copied(GRPOTrainer):
    """Its scoring is TRL's, copied and changed: it calls no method of TRL's class."""

    def _generate_and_score_completions(self, inputs):
        return Sorts.change(self, STOCK_SCORING(self, inputs), None)


class Prepared(GRPOTrainer):
    """Tensors, and nothing else, are reordered after the batch was scored."""

    def _prepare_inputs(self, inputs):
        batch = super()._prepare_inputs(inputs)
        tensors = {n: v for n, v in batch.items() if isinstance(v, torch.Tensor)}
        return of_rows(tensors, [4, 2, 6, 1, 7])


@pytest.mark.parametrize(
    ("trainer_class", "config"),
    [
        (Copied, "masks"),
        pytest.param(Copied, "plain", marks=pytest.mark.slow),
        pytest.param(Copied, "padded experts", marks=pytest.mark.slow),
    ],
)
def test_a_copy_of_the_scoring_is_matched_too(tmp_path, trainer_class, config):
    assert_trains_its_own_rows(tmp_path, trainer_class, config)


@pytest.mark.parametrize("config", ["masks", pytest.param("experts", marks=pytest.mark.slow)])
def test_rows_that_are_chosen_after_the_scoring_are_matched_too(tmp_path, config):
    settings, family = CONFIGS[config], "qwen3_moe" if config == "experts" else "qwen3"
    run = trained(tmp_path, Prepared, settings[0], family, **settings[1])
    assert_learned_as_trl_would(*run, family)


@pytest.mark.slow
def test_truncated_completions_of_a_copied_scoring_are_masked_by_their_finish_reason(tmp_path):
    settings = {"mask_truncated_completions": True, "generation_kwargs": {"stop_strings": ["7"]}}
    for trainer_class in (Copied, class_that(Sorts, GRPOTrainer)):
        _, _, batches = trained(tmp_path / trainer_class.__name__, trainer_class, {}, **settings)
        masks = []
        for inputs in batches:
            rows = zip(inputs[ROWS_KEY], inputs["completion_mask"].any(1).tolist(), strict=True)
            for row, is_trained in rows:
                is_whole = row.is_stopped or row.completion_ids[-1] in ENDS
                assert is_trained == is_whole
                masks.append(is_trained)
        assert set(masks) == {True, False}


class Makes:
    """Adds a row that nobody sampled."""

    def change(self, batch, _):
        batch = of_rows(batch, [0, 1, 2, 3, 3])
        batch["completion_ids"][4, 0] = 98
        batch["completion_mask"][4, 1:] = 0
        return batch


@pytest.mark.parametrize(
    ("change", "config", "settings", "said"),
    [
        ("Makes", {"sampling_mask": "replay"}, {"top_k": TOP_K}, "set sampling_mask='ignore'"),
        (
            "Replays",
            {"sampling_mask": "replay", "replay_num_rollouts": 0},
            {"top_k": TOP_K},
            "nor in the 0 earlier training rollouts that are kept",
        ),
        pytest.param(
            *("Makes", {"router_replay": True}, {}, "or set router_replay=False"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_row_without_the_record_that_a_setting_needs_is_named(
    tmp_path, change, config, settings, said
):
    changes = CHANGES | {"Makes": Makes}
    family = "qwen3_moe" if "router_replay" in config else "qwen3"
    trainer_class = class_that(changes[change], GRPOTrainer)
    with pytest.raises(ConfigurationError, match=rf"row 4 of a batch of \d .*{said}"):
        trained(tmp_path, trainer_class, config, family, **settings)


@pytest.mark.parametrize("old_logps", ["rollout", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_row_of_its_own_trains_where_no_record_is_needed(tmp_path, old_logps):
    run = trained(tmp_path, class_that(Makes, GRPOTrainer), {"old_logps": old_logps})
    assert_learned_as_trl_would(*run, "qwen3")


@pytest.mark.parametrize(
    ("change", "keeps"), [(Replays, True), pytest.param(Sorts, False, marks=pytest.mark.slow)]
)
def test_rows_of_an_older_policy_keep_its_log_probabilities(tmp_path, change, keeps):
    _, _, batches = trained(tmp_path, class_that(change, GRPOTrainer), {})
    # Those of the first rollout are recomputed.
    assert ["old_per_token_logps" in inputs for inputs in batches] == [True, keeps]


def test_a_second_generation_of_a_batch_is_counted_once(tmp_path):
    trainer, record, _ = trained(tmp_path, class_that(GeneratesTwice, GRPOTrainer), {})
    assert len(record.turns) == 4
    for step, tokens in enumerate(logged(trainer, "rollout/tokens")):
        lengths = [len(ids) for turn in record.turns[2 * step : 2 * step + 2] for ids in turn]
        assert tokens == sum(lengths) / 2


class GeneratesFromBuffer:
    """Completions of the last rollout stand in for half of those that TRL is about to score."""

    def _generate(self, prompts):
        generated = list(super()._generate(prompts))
        earlier, self.buffer = getattr(self, "buffer", generated), list(generated)
        for index, column in enumerate(generated):
            if isinstance(column, list) and len(column) == len(prompts):
                generated[index] = [*column[4:], *earlier[index][:4]]
        return tuple(generated)


@pytest.mark.parametrize("config", ["masks", pytest.param("experts", marks=pytest.mark.slow)])
def test_completions_of_an_earlier_rollout_keep_their_records(tmp_path, config):
    class Changed(GeneratesFromBuffer, GRPOTrainer):
        pass

    settings, family = CONFIGS[config], "qwen3_moe" if config == "experts" else "qwen3"
    run = trained(tmp_path, Changed, settings[0], family, **settings[1])
    assert_learned_as_trl_would(*run, family)
    versions = [[set(row.versions) for row in inputs[ROWS_KEY]] for inputs in run[2]]
    assert versions[1].count({1}) == versions[1].count({2}) == 4


def test_completions_of_an_earlier_policy_are_no_drift(tmp_path):
    class Changed(GeneratesFromBuffer, GRPOTrainer):
        pass

    config = {"verify_num_sequences": 8, "old_logps": "trainer"}
    settings = {"learning_rate": 1.0, "max_steps": 3}
    trainer, *_ = trained(tmp_path, Changed, config, **settings)
    # They do differ from the policy that is trained.
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 0.01
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-4


def test_a_row_of_its_own_generation_is_named_where_its_record_is_needed(tmp_path):
    class Changed(GRPOTrainer):
        def _generate(self, prompts):
            generated = super()._generate(prompts)
            generated[1][3] = [98] * len(generated[1][3])
            return generated

    with pytest.raises(ConfigurationError, match=r"row 3 of a batch of 8 .* Raise replay_num"):
        trained(tmp_path, Changed, {"sampling_mask": "replay"}, top_k=TOP_K)
