"""Stock trainers of TRL whose completions are sampled by a pool."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import ray
import torch
from datasets import Dataset
from peft import LoraConfig
from processes import run_processes
from tiny import char_tokenizer, plain_logprobs, tiny_model
from tiny_trainer import PROBLEMS, logged, share_of_sevens, tiny_trainer
from tiny_vision import picture, tiny_vision_model
from tiny_vision_trainer import vision_trainer
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from waiting import wait_until

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    attach,
    detach,
)
from cb_rollout.engine.service.input_processor import InputProcessor
from cb_rollout.integrations.async_grpo import AsyncRollouts
from cb_rollout.integrations.ray import RolloutPool
from cb_rollout.integrations.ray.pool import PooledGenerator
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import PartialRollouts

WAIT = 300.0
CONFIG = RolloutConfig(
    num_blocks=256, max_requests_per_batch=16, seed=3, verify_every_steps=1, max_logprob_drift=1e-4
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def pool(checkpoint, cluster):
    """One pool for all trainers of this file, one after the other."""
    with RolloutPool(
        checkpoint, CONFIG, num_workers=2, tokenizer=char_tokenizer(), timeout_seconds=WAIT
    ) as made:
        yield made


@pytest.fixture(scope="module")
def cluster():
    made = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield made.address_info["address"]
    ray.shutdown()


class KillAtSecondStep(TrainerCallback):
    """Kills a worker's process as soon as the second rollout has sampled something."""

    def __init__(self, pool):
        self._pool, self.killed = pool, None

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 1:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self):
        before = self._pool.manager.counters.tokens_generated
        while self._pool.manager.counters.tokens_generated == before:
            threading.Event().wait(0.002)
        worker = next(w for w in self._pool.manager._workers.values() if w.description)
        self.killed = worker.description.process_id
        os.kill(self.killed, signal.SIGKILL)


def versions_since(version, trainer):
    return [found - version for found in logged(trainer, "rollout/policy_version")]


@pytest.mark.slow
def test_a_stock_trainer_samples_on_a_pool_whose_worker_is_killed(tmp_path, pool):
    trainer, before = tiny_trainer(tmp_path, max_completion_length=200), pool.policy_version
    kill = KillAtSecondStep(pool)
    trainer.add_callback(kill)
    generator = attach(trainer, pool)
    trainer.train()
    assert kill.killed is not None
    # The trainer's own forward of every step is the reference.
    drifts = logged(trainer, "rollout/logprob_drift_max")
    assert len(drifts) == 3
    assert max(drifts) <= 1e-5
    assert versions_since(before, trainer) == [1, 2, 3]
    lengths = logged(trainer, "completions/mean_length")
    tokens = logged(trainer, "rollout/tokens")
    # A dead worker's last tokens were sampled twice, and its last report may be lost.
    assert [tokens[0], tokens[2]] == [16 * lengths[0], 16 * lengths[2]]
    outputs = generator.generate_batch(["1+2="] * 2, max_new_tokens=3)
    assert {o.policy_versions[0][0] for o in outputs.values()} == {before + 3}
    detach(trainer)
    assert trainer.use_vllm is False
    assert len(pool.generate_batch(["1+2="], max_new_tokens=2)) == 1


@pytest.mark.slow
def test_a_trainer_learns_the_same_on_a_pool_and_on_an_engine(tmp_path, pool):
    # The pool has numbered sequences before; their numbers give the seeds.
    pool.manager.input_processor = InputProcessor(pool.manager.limits, CONFIG.seed, None)
    found = []
    for config in (CONFIG, pool):
        trainer = tiny_trainer(tmp_path, max_completion_length=30)
        attach(trainer, config)
        trainer.train()
        detach(trainer)
        found.append(trainer)
    engine, pooled = found
    for name in ("loss", "grad_norm", "completions/mean_length", "reward"):
        values = logged(engine, name)
        assert len(values) == 3
        assert logged(pooled, name) == pytest.approx(values, abs=1e-5), name
    assert max(map(abs, logged(engine, "loss"))) > 1e-4
    for ours, theirs in zip(pooled.model.parameters(), engine.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
def test_strategies_carry_their_sequences_on_a_pool(tmp_path, pool):
    trainer = tiny_trainer(
        tmp_path,
        max_completion_length=40,
        generation_kwargs={"eos_token_id": list(range(1, 9))},
        vllm_importance_sampling_mode="token_truncate",
    )
    before = pool.policy_version
    attach(trainer, pool)
    use_strategy(trainer, PartialRollouts(num_extra_groups=2, max_staleness=3))
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert versions_since(before, trainer) == [1, 2, 3]
    # Carried sequences end with the training.
    status = pool.manager.status()
    assert (status.requests_running, status.requests_waiting) == (0, 0)
    detach(trainer)


@pytest.mark.slow
def test_adapters_train_on_a_pool_that_another_trainer_has_left(tmp_path, pool):
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = tiny_trainer(
        tmp_path,
        trainer_class=RLOOTrainer,
        config_class=RLOOConfig,
        trainer_arguments={"peft_config": lora},
        max_completion_length=40,
    )
    before = pool.policy_version
    first = tiny_trainer(tmp_path, max_steps=1)
    attach(first, pool)
    first.train()
    detach(first)
    attach(trainer, pool)
    trainer.train()
    assert max(logged(trainer, "rollout/logprob_drift_max")) <= 1e-5
    assert versions_since(before, trainer) == [2, 3, 4]
    detach(trainer)


@pytest.mark.slow
def test_each_process_of_a_trainer_samples_its_share_on_a_pool_of_its_own(
    checkpoint, cluster, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    first, second = run_processes("distributed/trl_pool.py", checkpoint, "own")
    assert first["weights"] == second["weights"]
    assert first["version"] == second["version"] == 3
    # One worker in each pool.
    assert len(first["worker_pids"]) == len(second["worker_pids"]) == 1
    assert first["worker_pids"] != second["worker_pids"]
    # Processes never draw the same numbers.
    assert first["tokens"] != second["tokens"]
    assert len(first["drifts"]) == 2
    assert max(first["drifts"]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "num_processes"),
    [
        *(("ddp", 2), ("fsdp2", 4), ("fsdp2_lora", 2), ("fsdp2_tools", 2)),
        *(("fsdp1", 2), ("zero3", 2)),
    ],
)
def test_the_processes_of_a_trainer_share_a_pool(
    checkpoint, cluster, monkeypatch, way, num_processes
):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    ranks = run_processes("distributed/trl_pool.py", checkpoint, way, num_processes=num_processes)
    # The forward of the sharded trainer is the reference.
    assert len(ranks[0]["drifts"]) == 2
    assert max(ranks[0]["drifts"]) <= 1e-5
    for rank in ranks:
        assert rank["version"] == 3
        assert rank["num_alive"] >= 1
        assert rank["versions"] == [[2, len(rank["tokens"])]]
        # No process holds more than a bucket, the one before and one tensor; FSDP1 a whole unit.
        assert rank["most_bytes"] <= 3 * rank["bucket_bytes"] or way in ("ddp", "fsdp1")
        assert rank["all_bytes"] > 4 * rank["bucket_bytes"]
        prompt, module = rank["refused"]
        assert "outside the model's vocabulary" in prompt
        assert module.startswith("WeightSyncError")
    assert len({tuple(rank["tokens"]) for rank in ranks}) > 1
    if "tools" not in way:
        counts = [8 * num_processes * length for length in ranks[0]["lengths"]]
        assert ranks[0]["rollout_tokens"] == counts


@pytest.mark.slow
def test_sharded_processes_train_on_split_workers_as_on_an_engine_of_their_own(
    tmp_path, cluster, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    checkpoint = str(tmp_path)
    # Four processes can share the keys of so many heads.
    tiny_model(vocab_size=len(char_tokenizer()), num_key_value_heads=4).save_pretrained(checkpoint)
    pooled, engines = (
        run_processes("distributed/trl_pool.py", checkpoint, way, num_processes=4)
        for way in ("fsdp2_split", "fsdp2_engine")
    )
    for by_pool, by_engine in zip(pooled, engines, strict=True):
        assert by_pool["tokens"] == by_engine["tokens"]
        assert by_pool["lengths"] == by_engine["lengths"]
        assert by_pool["losses"] == pytest.approx(by_engine["losses"], abs=1e-6)
        assert by_pool["most_bytes"] <= 3 * by_pool["bucket_bytes"]
    assert any(pooled[0]["losses"])
    assert max(pooled[0]["drifts"]) <= 1e-5


@pytest.mark.slow
def test_sharded_processes_send_their_adapters_alone(checkpoint, cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    ranks = run_processes("distributed/trl_pool.py", checkpoint, "fsdp2_adapters")
    assert max(ranks[0]["drifts"]) <= 1e-5
    for rank in ranks:
        assert rank["sent_bytes"] < rank["bucket_bytes"] < rank["all_bytes"]


@pytest.mark.slow
def test_prompts_with_images_are_sampled_on_a_pool(tmp_path, cluster):
    model, processor = made = tiny_vision_model("llava")
    model.save_pretrained(tmp_path / "checkpoint")
    trainer = vision_trainer(tmp_path, "llava", made=made)
    prompts = [
        {"prompt": "w60 <image> w61 <image>", "images": [picture(0), picture(1)]},
        {"prompt": "w60 <image>", "images": [picture(2, (50, 70))]},
        "w60 w62",
    ]
    params = SamplingParams(temperature=1.0, max_new_tokens=9)
    sampled = {"sampling_params": params, "num_return_sequences": 3}
    with RolloutGenerator(model, CONFIG, tokenizer=processor) as generator:
        expected = generator.generate_batch(prompts, **sampled)
    with RolloutPool(
        str(tmp_path / "checkpoint"), CONFIG, num_workers=2, tokenizer=processor
    ) as pool:
        outputs = pool.generate_batch(prompts, **sampled)
        assert [o.generated_tokens for o in outputs.values()] == [
            o.generated_tokens for o in expected.values()
        ]
        assert [o.images is None for o in outputs.values()] == [False] * 6 + [True] * 3
        attach(trainer, pool)
        trainer.train()
    drifts = logged(trainer, "rollout/logprob_drift_max")
    assert len(drifts) == trainer.state.global_step
    assert max(drifts) <= 1e-5


@pytest.mark.slow
def test_the_loss_takes_the_experts_that_a_pools_workers_chose(tmp_path, cluster):
    char_tokenizer().save_pretrained(tmp_path / "checkpoint")
    experts = {"num_experts": 16, "num_experts_per_tok": 4}
    model = tiny_model("qwen3_moe", vocab_size=len(char_tokenizer()), **experts)
    model.save_pretrained(tmp_path / "checkpoint")
    trainer = tiny_trainer(tmp_path, model=model, max_steps=2, num_iterations=2, learning_rate=2.0)
    config = RolloutConfig(num_blocks=256, router_replay=True)
    with RolloutPool(str(tmp_path / "checkpoint"), config, num_workers=1) as pool:
        attach(trainer, pool)
        trainer.train()
    first, second = logged(trainer, "rollout/router_disagreement")
    # Weights of the second step are no longer those that sampled, and its loss counts by how much.
    assert first == 0
    assert second > 0


class Watched(AsyncRollouts):
    """Keeps each sample as the trainer takes it, and the weights that it sends."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.taken, self.policies = [], {}

    def _report_age(self, sample):
        super()._report_age(sample)
        self.taken.append(sample)

    def send_weights(self, iterator):
        sent = {name: tensor.clone() for name, tensor in iterator}
        super().send_weights(iter(sent.items()))
        policy = tiny_model(vocab_size=len(char_tokenizer()))
        policy.load_state_dict(sent, strict=False)
        self.policies[self.generator.policy_version] = policy


@pytest.mark.slow
def test_asynchronous_rollouts_on_a_pool_have_the_version_of_every_token(
    tmp_path, pool, checkpoint
):
    args = async_settings(tmp_path)
    rows = Dataset.from_list([row | {"answer": "7"} for row in PROBLEMS])
    rollouts = Watched(checkpoint, args, rows, share_of_sevens, pool=pool)
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        args=args,
        train_dataset=rows,
        processing_class=char_tokenizer(),
        rollout_worker=rollouts,
        weight_transfer=rollouts,
    )
    trainer.train()
    assert trainer.state.global_step == 4
    offset = rollouts._version.first
    assert len(rollouts.taken) >= 32
    for sample in rollouts.taken:
        num_prompt = int((sample.completion_mask == 0).sum())
        ids, logprobs = sample.input_ids.tolist(), sample.old_log_probs.tolist()
        start = num_prompt
        assert sum(count for _, count in sample.token_versions) == len(ids) - num_prompt
        for version, count in sample.token_versions:
            policy = rollouts.policies[version - offset]
            expected = plain_logprobs(policy, ids[:num_prompt], ids[num_prompt:])
            part = expected[start - num_prompt : start - num_prompt + count]
            assert logprobs[start : start + count] == pytest.approx(part, abs=1e-5)
            start += count
    # Workers end what was cancelled once the trainer has ended; the pool is its owner's.
    assert pool.manager.status().requests_waiting == 0
    wait_until(lambda: pool.manager.status().requests_running == 0)
    assert len(pool.generate_batch(["1+2="], max_new_tokens=2)) == 1


def async_settings(tmp_path):
    return AsyncGRPOConfig(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=60, learning_rate=1e-3, token_budget=0, max_staleness=2,
        logging_steps=1, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip


def test_a_pool_has_a_config_already(tmp_path):
    rows = Dataset.from_list(PROBLEMS)
    with pytest.raises(ConfigurationError, match="a pool has a config already"):
        AsyncRollouts(
            "unused", async_settings(tmp_path), rows, share_of_sevens,
            config=RolloutConfig(), pool=pool_of(),
        )  # fmt: skip


def pool_of(**settings):
    return SimpleNamespace(config=RolloutConfig(**settings), tokenizer=None)


def test_a_shared_pool_has_no_strategies(tmp_path):
    rows, pool = Dataset.from_list(PROBLEMS), object.__new__(RolloutPool)
    pool._group = object()
    with pytest.raises(
        ConfigurationError, match="AsyncRollouts samples in each process separately"
    ):
        AsyncRollouts("unused", async_settings(tmp_path), rows, share_of_sevens, pool=pool)


def test_settings_that_a_pools_trainer_cannot_use_are_named():
    with pytest.raises(ConfigurationError, match=r"return_logprobs=.*a trainer with a pool"):
        PooledGenerator(pool_of(return_logprobs=False), tiny_model())
