"""The sampled log-probabilities as the old ones: the same learning, a forward less, and a guard."""

import math
import pickle
import re

import pytest
import torch
from nightly import slow_after
from playback import assert_learned_alike, play_back, watched
from tiny import tiny_model
from tiny_trainer import logged, tiny_trainer
from trl import RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, LogprobDriftError, RolloutConfig, attach
from cb_rollout.engine.attention.decode_cache import DecodeLayer
from cb_rollout.engine.memory.system import DeviceMemory
from cb_rollout.engine.sampling import sampler as sampling
from cb_rollout.integrations.trl import guard as guard_module
from cb_rollout.integrations.trl.guard import ComparedRow
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.rollout.audit import drift_audit
from cb_rollout.rollout.audit.report import Cause
from cb_rollout.weights.copied import CopiedWeights

QUICK = {"per_device_train_batch_size": 8, "num_generations": 4, "optim": "sgd"}
UNGUARDED = {"old_logps": "rollout", "verify_every_steps": 0}
RLOO = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}


def trained(output_dir, config, turns=None, **settings):
    trainer = tiny_trainer(output_dir, **(QUICK | settings))
    # The forwards that are counted are the trainer's own.
    generator = attach(trainer, RolloutConfig(**({"loss_forward": "trainer"} | config)))
    record = watched(trainer) if turns is None else play_back(trainer, turns)
    trainer.train()
    generator.close()
    return trainer, record


@pytest.mark.parametrize(
    ("settings", "num_saved"),
    slow_after(1, [({}, 3), ({"num_iterations": 2, "max_steps": 4}, 2), (RLOO, 3)]),
    ids=["grpo", "iterations", "rloo"],
)
def test_a_forward_is_saved_and_the_loss_stays_the_same(tmp_path, settings, num_saved):
    _, ours = trained(tmp_path / "rollout", UNGUARDED, **settings)
    _, theirs = trained(tmp_path / "trainer", {"verify_every_steps": 0}, **settings)
    assert_learned_alike(ours, theirs)
    assert (ours.num_scoring_forwards, theirs.num_scoring_forwards) == (0, num_saved)


def test_without_the_correction_the_sampled_ones_are_the_old_ones_too(tmp_path):
    settings = {"vllm_importance_sampling_correction": False}
    _, ours = trained(tmp_path / "ours", UNGUARDED, **settings)
    theirs = tiny_trainer(tmp_path / "theirs", **(QUICK | settings))
    record = play_back(theirs, ours.turns)
    theirs.train()
    assert_learned_alike(ours, record)


@pytest.mark.fast_cases("unverified")
@pytest.mark.parametrize(
    ("config", "settings", "num_forwards"),
    [
        # The first rollout's, two sequences of the third's, and once more each: their rounding.
        ({"verify_every_steps": 2}, {}, 4),
        pytest.param({}, RLOO, 2, marks=pytest.mark.slow),
        # Nothing is verified, and so nothing is known of the sampled ones.
        ({"verify_every_steps": 0}, {}, 3),
    ],
    ids=["grpo", "rloo", "unverified"],
)
def test_auto_takes_the_sampled_ones_from_the_second_rollout_on(
    tmp_path, config, settings, num_forwards
):
    _, ours = trained(tmp_path / "ours", {"old_logps": "auto"} | config, **settings)
    theirs = tiny_trainer(tmp_path / "theirs", **(QUICK | settings))
    record = play_back(theirs, ours.turns)
    theirs.train()
    assert_learned_alike(ours, record)
    assert ours.num_scoring_forwards == num_forwards


def test_the_guard_logs_how_far_they_are_from_the_trainers(tmp_path):
    config = {"old_logps": "rollout", "verify_every_steps": 2, "max_logprob_drift": 1e-3}
    trainer, record = trained(tmp_path, config)
    rows = [row for row in trainer.state.log_history if "rollout/logprob_drift_max" in row]
    assert [row["step"] for row in rows] == [1, 3]
    assert record.num_scoring_forwards == 4
    for row in rows:
        assert 0 < row["rollout/logprob_drift_mean"] <= row["rollout/logprob_drift_max"] <= 1e-5
        assert abs(row["rollout/logprob_drift_k1"]) <= 1e-5
        assert 0 <= row["rollout/logprob_drift_k3"] <= 1e-9
        assert abs(row["rollout/logprob_drift_chi_squared"]) <= 1e-5
        assert row["rollout/logprob_drift_effective_sample_size"] == pytest.approx(1)
        assert "rollout/logprob_drift_first_token" not in row


def off_by_half(monkeypatch, value=0.5, index=3):
    """Report the sequences' `index`-th log-probabilities wrong."""
    sample = sampling.sample

    def lying_sample(logits_BV, batch, indices_B, *rest):
        sampled = sample(logits_BV, batch, indices_B, *rest)
        lie_B = torch.where(indices_B == index, value, 0.0)
        return sampled._replace(logprobs_B=sampled.logprobs_B + lie_B)

    monkeypatch.setattr(sampling, "sample", lying_sample)


@pytest.mark.slow
def test_auto_recomputes_where_the_sampled_ones_lie_and_says_so_once(tmp_path, monkeypatch):
    off_by_half(monkeypatch)
    config = {"old_logps": "auto", "verify_every_steps": 1}
    with pytest.warns(
        UserWarning, match=r"old_logps='auto'.* differ from the trainer's by"
    ) as caught:
        _, ours = trained(tmp_path / "auto", config)
    assert sum("old_logps" in str(warning.message) for warning in caught) == 1
    _, theirs = trained(tmp_path / "trainer", {"old_logps": "trainer", "verify_every_steps": 0})
    assert_learned_alike(ours, theirs)
    # Each rollout's rounding is measured.
    assert ours.num_scoring_forwards == 2 * theirs.num_scoring_forwards == 6


GUARDED = {"old_logps": "rollout", "verify_every_steps": 1, "max_logprob_drift": 0.01}


def test_a_lie_in_the_log_probabilities_is_named(tmp_path, monkeypatch):
    off_by_half(monkeypatch)
    said = r"row (\d+), req_(\d+), generated token 3 \('.*'\).*is 0\.5 nats.*drift=0\.01"
    with pytest.raises(LogprobDriftError, match=said) as raised:
        trained(tmp_path, GUARDED)
    row, request = re.search(said, str(raised.value)).groups()
    assert row == request, "of the first step's requests"


@pytest.mark.slow
def test_each_verification_takes_other_sequences(tmp_path, monkeypatch):
    names, seen = [], guard_module.drift

    def watched_drift(sampled, recomputed, noise):
        names.append([int(name.split()[1].rstrip(",")) for name in sampled])
        return seen(sampled, recomputed, noise)

    monkeypatch.setattr(guard_module, "drift", watched_drift)
    config = {"old_logps": "trainer", "verify_every_steps": 1, "verify_num_sequences": 3}
    trained(tmp_path, config, max_steps=4)
    assert names == [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5]]


def test_no_number_is_drift(tmp_path, monkeypatch):
    off_by_half(monkeypatch, math.nan)
    config = GUARDED | {"old_logps": "trainer"}
    with pytest.raises(LogprobDriftError, match=r"generated token 3 .*is inf nats"):
        trained(tmp_path, config)


def test_a_fault_in_the_cached_keys_is_named_where_it_begins(tmp_path, monkeypatch):
    update, num_writes = DecodeLayer.update, [0]

    def faulty_update(self, keys, values, *arguments, **named):
        if keys.shape[2] == 1:
            num_writes[0] += 1
            if num_writes[0] in (9, 10):  # both layers, fifth decode step
                keys = keys + 3.0
        return update(self, keys, values, *arguments, **named)

    trainer = tiny_trainer(tmp_path, **QUICK)
    attach(trainer, RolloutConfig(**GUARDED))
    monkeypatch.setattr(DecodeLayer, "update", faulty_update)
    with pytest.raises(LogprobDriftError, match=r"row \d, req_\d+, generated token \d+ ") as caught:
        trainer.train()
    assert "token 5" in str(caught.value)


@pytest.mark.slow
def test_a_run_falls_back_to_recomputing(tmp_path, monkeypatch):
    off_by_half(monkeypatch)
    with pytest.warns(
        UserWarning, match="the trainer recomputes the old log-probabilities from now on"
    ):
        trainer, ours = trained(tmp_path / "a", GUARDED | {"on_logprob_drift": "recompute"})
    theirs = tiny_trainer(tmp_path / "b", **QUICK)
    attach(theirs, RolloutConfig(verify_every_steps=0))
    record = watched(theirs)
    theirs.train()
    assert_learned_alike(ours, record)
    # One for the rows that were verified, then all; and the rounding of each.
    assert ours.num_scoring_forwards == 1 + 3 + 3
    assert trainer.state.global_step == 3


def forget_the_temperature(monkeypatch):
    """Draw and report as at temperature 1, where the trainer asks for 0.5."""
    sample = sampling.sample

    def warm_sample(logits_BV, *rest):
        return sample(logits_BV * 0.5, *rest)

    monkeypatch.setattr(sampling, "sample", warm_sample)
    return {"temperature": 0.5}


def counted_audits(monkeypatch, audit=drift_audit.audit):
    """List the reports of all audits, which `audit` makes."""
    reports = []

    def counted(*arguments, **named):
        reports.append(None)
        reports[-1] = audit(*arguments, **named)
        return reports[-1]

    monkeypatch.setattr(drift_audit, "audit", counted)
    return reports


def test_the_error_names_the_cause(tmp_path, monkeypatch):
    settings = forget_the_temperature(monkeypatch)
    said = r"rollout and loss\. Log-probabilities differ by: temperature \(not applied\)\. Have the"
    with pytest.raises(LogprobDriftError, match=said) as raised:
        trained(tmp_path, GUARDED, **settings)
    report = raised.value.report
    assert report.cause is Cause.TEMPERATURE
    assert 2 <= len(report.starts) <= 4
    assert pickle.loads(pickle.dumps(raised.value)).report == report
    # The report's page shows it.
    assert (tmp_path / "cb_rollout" / "audit.txt").read_text() == f"Step 1. {report}\n"


@pytest.mark.fast_cases("recompute")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"old_logps": "auto", "verify_every_steps": 1},
            "the trainer recomputes the old ones, with one more forward per rollout",
        ),
        (
            GUARDED | {"on_logprob_drift": "recompute"},
            "the trainer recomputes the old log-probabilities from now on",
        ),
    ],
    ids=["auto", "recompute"],
)
def test_a_warning_names_the_cause_once(tmp_path, monkeypatch, config, said):
    settings, reports = forget_the_temperature(monkeypatch), counted_audits(monkeypatch)
    said += r"\. Log-probabilities differ by: temperature \(not applied\)"
    with pytest.warns(UserWarning, match=said):
        trainer, _ = trained(tmp_path, config, **settings)
    assert [report.cause for report in reports] == [Cause.TEMPERATURE]
    assert trainer.state.global_step == 3


def test_weights_that_were_not_synced_are_the_cause(tmp_path, monkeypatch):
    trainer = tiny_trainer(tmp_path, **QUICK, learning_rate=0.1)
    attach(trainer, RolloutConfig(**GUARDED | {"max_logprob_drift": 1e-3}, weight_sync="copy"))
    monkeypatch.setattr(CopiedWeights, "sync", lambda self: 0)
    with pytest.raises(LogprobDriftError, match=r"older version \(the engine's copy\)") as raised:
        trainer.train()
    assert trainer.state.global_step == 1
    assert raised.value.report.cause is Cause.OLDER_VERSION


def failing_audit(*_, **__):
    raise RuntimeError("no audit")


@pytest.mark.parametrize("why", ["fails", "memory"])
def test_without_an_audit_the_error_is_what_it_was(tmp_path, monkeypatch, why):
    if why == "fails":
        monkeypatch.setattr(drift_audit, "audit", failing_audit)
    else:
        monkeypatch.setattr(drift_audit, "memory", lambda device: DeviceMemory(0, 0))
    settings = forget_the_temperature(monkeypatch)
    with pytest.raises(LogprobDriftError, match=r"between rollout and loss\.$") as raised:
        trained(tmp_path, GUARDED, **settings)
    assert raised.value.report is None


def test_tokens_of_a_tool_are_not_audited():
    ids, is_sampled = [10, 11, 12, 13, 14, 15], [True, True, False, True, True, True]
    row = LossRow(0, [1, 2], ids, is_sampled, [0.0] * 6, [None] * 6)
    compared = ComparedRow(row, [0, 1, 3, 4, 5], [-1.0] * 5, [-1.0, -1.0, -1.0, -1.5, -1.0])
    output = compared.first_difference(0.1, 0.7)
    assert output.prompt_ids == [1, 2, 10, 11, 12]
    assert (output.generated_tokens, output.logprobs) == ([13, 14, 15], [-1.0] * 3)
    assert output.temperature == 0.7
    assert compared.first_difference(0.6, 0.7) is None
    late = [-1.0] * 60
    row = LossRow(0, [1], list(range(60)), [True] * 60, late, [None] * 60)
    compared = ComparedRow(row, list(range(60)), late, [*late[:50], -2.0, *late[51:]])
    output = compared.first_difference(0.1, 1.0)
    assert output.generated_tokens == list(range(34, 60))


def test_a_verification_that_left_all_rows_out_finds_nothing(tmp_path):
    config = GUARDED | {"old_logps": "trainer"}
    trainer, _ = trained(tmp_path, config, mask_truncated_completions=True)
    drifts = [r.get("rollout/logprob_drift_max", 0) for r in trainer.state.log_history]
    assert max(drifts) <= 1e-5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"on_logprob_drift": "recompute"}, "needs old_logps='rollout' and a max_logprob_drift"),
        ({"old_logps": "rollout", "on_logprob_drift": "recompute"}, "a max_logprob_drift"),
    ],
)
def test_a_fallback_from_nothing_is_refused(config, said):
    with pytest.raises(ConfigurationError, match=said):
        RolloutConfig(**config)


def test_old_log_probabilities_of_another_distribution_are_refused(tmp_path):
    trainer = tiny_trainer(tmp_path, top_p=0.8)
    config = RolloutConfig(old_logps="rollout", logprobs_mode="processed")
    with pytest.raises(ConfigurationError, match="sampling_mask='replay' or logprobs_mode"):
        attach(trainer, config)
    assert not trainer.use_vllm


@pytest.mark.slow
def test_bf16_keeps_old_log_probabilities_in_float32(tmp_path):
    _, record = trained(tmp_path, UNGUARDED, bf16=True)
    assert all(map(math.isfinite, record.losses))
    assert record.num_scoring_forwards == 0


GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}


def test_rounding_that_a_narrow_epsilon_would_clip_is_recomputed(tmp_path):
    """GSPO clips sequences whose ratio is 3e-4 off 1, and 16 bits round by more."""
    settings = GSPO | {"bf16": True, "loss_type": "grpo", "num_iterations": 2, "learning_rate": 0.0}
    with pytest.warns(UserWarning, match=r"rounding alone would clip \d+% of the ratios"):
        trainer, record = trained(tmp_path, {"old_logps": "auto"}, max_steps=4, **settings)
    assert max(logged(trainer, "clip_ratio/region_mean")) == 0
    # Two rollouts, and the rounding of the first.
    assert record.num_scoring_forwards == 3


@pytest.mark.filterwarnings("error:old_logps")
def test_rounding_clips_nothing_where_a_rollout_trains_one_step(tmp_path):
    """The loss's own are the old ones then, and no forward recomputes them."""
    settings = GSPO | {"bf16": True, "loss_type": "grpo"}
    trainer, record = trained(tmp_path, {"old_logps": "auto"}, max_steps=4, **settings)
    assert max(logged(trainer, "clip_ratio/region_mean")) == 0
    # The first rollout's, and its rounding.
    assert record.num_scoring_forwards == 2
    assert all(value > 0 for value in logged(trainer, "sampling/sampling_logp_difference/max"))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:old_logps")
def test_logits_of_16_bits_that_are_large_are_trusted(tmp_path):
    """Between 16 and 32 one unit in the last place of bfloat16 is 0.125 nats."""
    model = tiny_model(vocab_size=99, num_hidden_layers=1)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        largest = model(input_ids=ids).logits.abs().max()
        model.lm_head.weight *= 28 / largest
        assert 20 < model(input_ids=ids).logits.abs().max() < 32
    config = {"old_logps": "auto", "loss_forward": "packed"}
    trainer, _ = trained(tmp_path, config, model=model, bf16=True)
    assert min(logged(trainer, "rollout/prompts_shared")) > 0
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 3
    assert all(0 < value < 1 for value in differences), (
        "sampled against the loss, also once trusted"
    )


def test_a_process_without_tokens_to_compare_follows_the_others(tmp_path, monkeypatch):
    """As where all its completions are truncated, and masked."""
    trainer = tiny_trainer(tmp_path)
    with attach(trainer, RolloutConfig(old_logps="auto")):
        guard = trainer._get_per_token_logps_and_entropies.__self__._guard
        # The other process compared tokens, and they agreed.
        of_other = iter([1.0, 0.0])
        monkeypatch.setattr(
            guard_module, "largest_of_all", lambda _accelerator, here: max(here, next(of_other))
        )
        guard._choose([], torch.tensor([1e-6]), None)
        assert guard.is_trusted
