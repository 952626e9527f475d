"""With loss_forward="packed" an attached trainer learns what TRL would, and logs what TRL would."""

import gc
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from nightly import slow_after, some_slow
from peft import LoraConfig
from playback import TOOLS, assert_learned_alike, double, play_back, watched, with_tools
from tiny import EOS, plain_logprobs, tiny_model
from tiny_trainer import PROBLEMS, logged, tiny_trainer
from trl import GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import ConfigurationError, RolloutConfig, attach
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.attention.packed import PackedAttention
from cb_rollout.integrations.trl import packed_loss, parts
from cb_rollout.metrics import live_metrics
from cb_rollout.packing.prefix_tree import NUM_COMPARED

SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 10,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-2,
}
RLOO = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig}
LORA = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")}

HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "moe"],
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "head_dim": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "ssm_state_size": 16,
        "n_groups": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
}

# Tokens that end a completion, so that lengths differ.
ENDS = [EOS, *range(20, 32)]

# What a clock says, and what only one of the two paths has.
CLOCKS = ("_time", "runtime", "per_second", "flos")


@pytest.fixture(autouse=True, scope="module")
def what_was_imported_is_no_garbage():
    """Each `train()` collects garbage, which takes four times as long as the rest of a cell."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def reference(tmp_path_factory):
    """A model of other weights, which TRL loads where a run has a reference model."""
    path = tmp_path_factory.mktemp("reference")
    tiny_model(vocab_size=99, num_hidden_layers=1, seed=1).save_pretrained(path)
    return path


def many_letters(completions, **_):
    """A reward that is often equal within a group."""
    return [float(len(str(c)) % 2) for c in completions]


def a_trainer(
    output_dir,
    monkeypatch,
    *,
    family="qwen3",
    reference=None,
    peft=False,
    tools=False,
    dropout=0.0,
    **settings,
):
    arguments = dict(LORA) if peft else {}
    if tools:
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS[:8]]
        arguments |= {"train_dataset": Dataset.from_list(rows), "tools": [double]}
        settings = TOOLS | settings
    sizes = {"num_hidden_layers": 1} | HYBRIDS.get(family, {})
    model = tiny_model(family, vocab_size=99, attention_dropout=dropout, **sizes)
    model.generation_config.eos_token_id = ENDS
    if reference is not None:
        model.config._name_or_path = str(reference)
    torch.manual_seed(0)
    return tiny_trainer(
        output_dir,
        model=model,
        reward=settings.pop("reward", many_letters),
        prepare_tokenizer=lambda tokenizer: with_tools(monkeypatch, tokenizer),
        trainer_arguments=arguments,
        **(SMALL | settings),
    )


def packed_run(output_dir, monkeypatch, settings, **config):
    """An attached trainer that packs, after training."""
    trainer = a_trainer(output_dir, monkeypatch, **settings)
    config = {"loss_forward": "packed", "verify_every_steps": 0} | config
    generator = attach(trainer, RolloutConfig(**config))
    record = watched(trainer)
    torch.manual_seed(0)
    try:
        trainer.train()
    finally:
        generator.close()
    return trainer, record


def trl_run(output_dir, monkeypatch, settings, turns):
    """TRL's own, on the same tokens."""
    trainer = a_trainer(output_dir, monkeypatch, **settings)
    assert not trainer.use_vllm
    record = play_back(trainer, turns)
    torch.manual_seed(0)
    trainer.train()
    return trainer, record


def assert_logged_alike(ours, theirs, tolerance=1e-4):
    pairs = list(zip(ours.state.log_history, theirs.state.log_history, strict=True))
    assert pairs
    for own, other in pairs:
        for name, value in other.items():
            if not name.endswith(CLOCKS) and not name.startswith("rollout/"):
                assert own[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def assert_packed(trainer):
    """Hardly anything was computed twice: rows without a gradient run apart from their group."""
    computed = logged(trainer, "rollout/loss_tokens_computed")
    needed = logged(trainer, "rollout/loss_tokens_useful")
    assert all(c <= 1.25 * n for c, n in zip(computed, needed, strict=True))
    assert max(logged(trainer, "rollout/prompts_shared")) > 0


class AdvantagesOfTokens(GRPOTrainer):
    """Gives each token an advantage of its own, as TRL's loss allows."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        positions_T = torch.arange(batch["completion_ids"].shape[1])
        return batch | {"advantages": batch["advantages"][:, None] * (positions_T % 2)}


CELLS = {
    "kl": {"beta": 0.1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "evaluate": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "num_generations_eval": 2,
        "scale_rewards": "batch",
        "loss_type": "dapo",
    },
    "lora": {"beta": 0.1, "peft": True, "loss_type": "bnpo"},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.05, "loss_type": "dr_grpo"},
    "masked": {
        "mask_truncated_completions": True,
        "num_iterations": 2,
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "loss_type": "bnpo",
    },
    "tools": {"tools": True, "loss_type": "dapo"},
    "rloo": {"beta": 0.1} | RLOO,
    "checkpointed": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "importance_sampling_level": "sequence",
    },
    "reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
        "beta": 0.1,
        "peft": True,
    },
    "advantages of tokens": {"trainer_class": AdvantagesOfTokens},
    "no advantage": {"reward": lambda completions, **_: [0.0] * len(completions)},
}


@pytest.mark.fast_cases("advantages of tokens")
@pytest.mark.parametrize("cell", some_slow(CELLS, list(CELLS)[::3], every=1))
def test_a_packed_run_learns_and_logs_what_trl_would(tmp_path, monkeypatch, reference, cell):
    settings = CELLS[cell] | {"reference": reference}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    theirs, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)
    assert_packed(ours)


@pytest.mark.parametrize("limit", slow_after(1, [30, 1]))
def test_a_batch_of_many_forwards_learns_the_same(tmp_path, monkeypatch, reference, limit):
    settings = {"beta": 0.1, "reference": reference, "loss_type": "dapo"}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings, loss_tokens_per_forward=limit)
    _, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other)
    shared, useful = (
        logged(ours, f"rollout/{name}") for name in ("prompts_shared", "loss_tokens_useful")
    )
    assert max(shared) < 8 - 2
    assert logged(ours, "rollout/loss_tokens_computed") > useful


def both_forwards(tmp_path, monkeypatch, settings, **config):
    """Attached runs that pack and that do not, where TRL has no path of its own to hold against."""
    runs = []
    for forward in ("packed", "trainer"):
        runs.append(
            packed_run(tmp_path / forward, monkeypatch, settings, loss_forward=forward, **config)
        )
    (ours, own), (theirs, other) = runs
    return ours, own, theirs, other


def test_truncated_sampling_is_replayed(tmp_path, monkeypatch):
    ours, own, theirs, other = both_forwards(
        tmp_path, monkeypatch, {"top_k": 20}, sampling_mask="replay", old_logps="trainer"
    )
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)
    assert_packed(ours)
    # Of 20 tokens at most; over the whole vocabulary it would be above 4.
    assert max(logged(ours, "entropy")) <= math.log(20)


@pytest.mark.slow
def test_bf16_differs_by_rounding(tmp_path, monkeypatch):
    settings = {"bf16": True, "loss_type": "dapo"}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    _, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other, tolerance=0.03)
    assert_packed(ours)


def test_a_router_is_balanced_over_all_rows(tmp_path, monkeypatch):
    settings = {"family": "qwen3_moe", "router_aux_loss_coef": 0.5}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    theirs, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert logged(theirs, "aux_loss")
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)
    # Its load is that of every token of every row.
    assert logged(ours, "rollout/prompts_shared") == [0, 0]


def test_a_router_balanced_over_the_batch_takes_no_limit_of_tokens(tmp_path):
    model = tiny_model("qwen3_moe", vocab_size=99)
    trainer = tiny_trainer(tmp_path, model=model, router_aux_loss_coef=0.5)
    with pytest.raises(ConfigurationError, match=r"loss_tokens_per_forward=1 .* a router loss"):
        attach(trainer, RolloutConfig(loss_tokens_per_forward=1))


def test_masked_rows_of_a_router_are_not_replayed(tmp_path, monkeypatch):
    settings = {"family": "qwen3_moe", "router_aux_loss_coef": 0.5, "top_k": 20}
    settings |= {"mask_truncated_completions": True, "max_completion_length": 6}
    ours, own, theirs, other = both_forwards(
        tmp_path, monkeypatch, settings, sampling_mask="replay", old_logps="trainer"
    )
    assert min(logged(ours, "rollout/rows_left_out")) > 0
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)


def test_the_comparison_runs_the_rows_it_compares(tmp_path, monkeypatch):
    score_batches, num_rows = packed_loss.score_batches, []

    def counting(model, batches, *rest, **named):
        num_rows.append(sum(len(batch.rows) for batch in batches))
        return score_batches(model, batches, *rest, **named)

    monkeypatch.setattr(packed_loss, "score_batches", counting)
    packed_run(tmp_path, monkeypatch, {"max_steps": 1})
    # Old log-probabilities, without gradients, and the loss are compared once each.
    assert num_rows == [NUM_COMPARED, 8] * 2


def test_the_loss_has_seconds_in_each_step(tmp_path, monkeypatch):
    now = iter(range(10**6))
    clock = SimpleNamespace(perf_counter=lambda: float(next(now)))
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    clock.time = clock.perf_counter
    for module in (parts, live_metrics):
        monkeypatch.setattr(module, "time", clock)
    trainer, _ = packed_run(tmp_path, monkeypatch, settings)
    # Two micro-batches: the clock is read at the two ends of each.
    assert logged(trainer, "rollout/loss_seconds") == [2, 2]


def warned(caught):
    return [str(warning.message) for warning in caught if "packed" in str(warning.message)]


@pytest.mark.parametrize(
    ("is_shared", "settings", "config"),
    [
        (True, {}, {}),
        # Layers that are computed again take no states.
        pytest.param(
            *(False, {"activation_checkpointing": True}, {"loss_tokens_per_forward": 1 << 20}),
            marks=pytest.mark.slow,
        ),
        pytest.param(True, {"bf16": True}, {}, marks=pytest.mark.slow),
    ],
    ids=["kept activations", "checkpointed layers", "bfloat16"],
)
def test_a_recurrent_model_goes_on_from_the_states_of_a_prompt(
    tmp_path, monkeypatch, is_shared, settings, config
):
    """In 16 bits the state that leaks between packed rows is within their rounding."""
    settings = {"family": "lfm2", "beta": 0.0, **settings}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings, **config)
    assert (min(logged(ours, "rollout/prompts_shared")) > 0) == is_shared
    if "bf16" in settings:
        return
    theirs, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="grpo"),
        pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.slow),
        pytest.param(RLOO, id="rloo", marks=pytest.mark.slow),
    ],
)
def test_a_state_space_model_trains_on_completions_of_two_tokens(tmp_path, monkeypatch, settings):
    """One token after a prompt: a step of decoding would write over the state of the prompt."""
    settings = {"family": "nemotron_h", "beta": 0.0, "max_steps": 3, **settings}
    ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    lengths = [len(ids) for turn in own.turns[1:] for ids in turn]
    assert lengths.count(2) > 0
    assert min(logged(ours, "rollout/prompts_shared")) > 0
    if "bf16" not in settings:
        theirs, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
        assert_learned_alike(own, other)
        assert_logged_alike(ours, theirs)


@pytest.mark.slow
def test_a_recurrent_model_whose_states_have_no_gradient_runs_padded(tmp_path, monkeypatch):
    """The log-probabilities are right, and the gradient of the prompt is lost."""
    repeat = hf_compat.repeat_states

    def cut(cache, *arguments):
        repeat(cache, *arguments)
        for layer in cache.layers:
            if hasattr(layer, "conv_states"):
                layer.conv_states = {i: x.detach() for i, x in layer.conv_states.items()}

    monkeypatch.setattr(hf_compat, "repeat_states", cut)
    settings = {"family": "lfm2", "beta": 0.0}
    with pytest.warns(UserWarning, match="gradients through forked states are") as caught:
        ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    assert len(warned(caught)) == 1
    theirs, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other)
    assert_logged_alike(ours, theirs)
    assert logged(ours, "rollout/prompts_shared") == [0, 0]
    # Rows of about one length.
    lengths = [9 + len(ids) for turn in own.turns for ids in turn]
    assert sum(logged(ours, "rollout/loss_tokens_computed")) < 8 * 2 * max(lengths)


def test_a_forward_that_lies_is_switched_off(tmp_path, monkeypatch):
    score_batches = packed_loss.score_batches

    def faulty(*arguments, **named):
        found = score_batches(*arguments, **named)
        return [scores._replace(logprobs_K=scores.logprobs_K + 0.5) for scores in found]

    monkeypatch.setattr(packed_loss, "score_batches", faulty)
    settings = {"loss_type": "dapo"}
    reason = "log-probabilities are .* by 0.5 nats"
    with pytest.warns(UserWarning, match=rf"is switched off \({reason}") as caught:
        ours, own = packed_run(tmp_path / "ours", monkeypatch, settings)
    assert len(warned(caught)) == 1
    _, other = trl_run(tmp_path / "theirs", monkeypatch, settings, own.turns)
    assert_learned_alike(own, other)
    assert max(logged(ours, "rollout/prompts_shared")) == 0


def test_a_later_batch_that_cannot_be_packed_is_left_to_the_trainer(tmp_path, monkeypatch):
    score_batches, calls = packed_loss.score_batches, []

    def failing(*arguments, **named):
        calls.append(1)
        if len(calls) > 4:
            raise ConfigurationError("its attention keeps a window of 8 tokens to itself")
        return score_batches(*arguments, **named)

    monkeypatch.setattr(packed_loss, "score_batches", failing)
    with pytest.warns(UserWarning, match="the trainer's own forward computes this batch"):
        ours, own = packed_run(tmp_path / "ours", monkeypatch, {"loss_type": "dapo"})
    _, other = trl_run(tmp_path / "theirs", monkeypatch, {"loss_type": "dapo"}, own.turns)
    assert_learned_alike(own, other)
    assert logged(ours, "rollout/prompts_shared")[-1] == 0


def test_attention_that_cannot_be_packed_names_its_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ConfigurationError("its attention is odd")

    monkeypatch.setattr(PackedAttention, "__call__", fail)
    with pytest.warns(UserWarning, match=r"cannot be shared \(its attention is odd\)") as caught:
        _, own = packed_run(tmp_path / "ours", monkeypatch, {})
    assert len(warned(caught)) == 1
    _, other = trl_run(tmp_path / "theirs", monkeypatch, {}, own.turns)
    assert_learned_alike(own, other)


def test_dropout_is_no_difference(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="trains with dropout") as caught:
        trainer, record = packed_run(tmp_path, monkeypatch, {"dropout": 0.5})
    assert warned(caught) == []
    assert trainer.model.training
    assert min(logged(trainer, "rollout/prompts_shared")) > 0
    assert all(map(math.isfinite, record.losses))


def test_memory_that_runs_out_is_no_reason_to_fall_back(tmp_path, monkeypatch):
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(packed_loss, "score_batches", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        packed_run(tmp_path, monkeypatch, {})


@pytest.mark.slow
def test_rows_of_either_set_of_rotary_factors_are_scored_as_alone(tmp_path):
    limits = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8}
    rope |= {"long_factor": [8.0] * 8, "original_max_position_embeddings": 16}
    model = tiny_model("phi3", vocab_size=99, rope_parameters=rope, **limits)
    trainer = tiny_trainer(tmp_path, model=model, **SMALL)
    prompts = [[5, 6, 7]] * 3 + [[8] * 12]
    completions = [[9, 10, 11], list(range(20, 40)), [12], [13, 14, 15, 16, 17]]
    ids, mask = torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first, stop = 12 - len(prompt), 12 + len(completion)
        ids[row, first:stop], mask[row, first:stop] = torch.tensor(prompt + completion), 1
    with attach(trainer, RolloutConfig(loss_forward="packed", verify_every_steps=0)):
        found, *_ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 20)
    for row, prompt, completion in zip(found, prompts, completions, strict=True):
        expected = plain_logprobs(model.eval(), prompt, completion)
        assert row[: len(completion)].tolist() == pytest.approx(expected, abs=1e-5)
