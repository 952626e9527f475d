"""A server's requests never run the module while it trains."""

import httpx
import pytest
import torch
from served import Asked, running
from tiny import tiny_model
from tiny_trainer import logged, tiny_trainer
from transformers import TrainerCallback

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, attach

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)


def forwards(generator):
    counters = generator.manager.counters
    return counters.prefill_forwards + counters.decode_forwards


@pytest.mark.fast_cases("never")
@pytest.mark.parametrize("release_cache", ["never", "between_steps"])
def test_training_under_a_server_is_training_and_no_forward_runs_beside_it(tmp_path, release_cache):
    trainer = tiny_trainer(tmp_path)
    generator = attach(trainer, RolloutConfig(weight_sync="shared", release_cache=release_cache))
    seen, before = [], {}

    class Between(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            seen.append((trainer.model.training, forwards(generator) - before["loss"]))

    loss = trainer.compute_loss

    def watched(*args, **kwargs):
        before["loss"] = forwards(generator)
        return loss(*args, **kwargs)

    trainer.compute_loss = watched
    trainer.add_callback(Between())
    with generator.serve(port=0) as server:
        asked = Asked(
            lambda path, body: httpx.post(f"{server.url}{path}", json=body, timeout=60),
            "long",
            max_tokens=400,
        )
        running(generator, 1)
        trainer.train()
        assert seen == [(True, 0)] * 3
        assert len(logged(trainer, "reward")) == 3
        generator.wake()
        assert len(asked.choice()["token_ids"]) == 400
    generator.close()


def test_requests_of_others_wait_after_a_rollout_of_a_model_in_training_mode():
    model = tiny_model().train()
    with RolloutGenerator(model, RolloutConfig(weight_sync="shared")) as generator:
        manager = generator.manager
        manager.start()
        long = SamplingParams(max_new_tokens=300, ignore_eos=True)
        request_id = manager.add_request([5, 6], sampling_params=long)
        generator.generate_batch([[7, 8]], sampling_params=PARAMS)
        before = forwards(generator)
        assert model.training
        loss = model(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([[5, 6, 7]])).loss
        loss.backward()
        assert (model.training, forwards(generator)) == (True, before)
        generator.wake()
        assert len(manager.get_result(request_id).generated_tokens) == 300


def test_an_engine_that_runs_a_copy_or_a_model_in_evaluation_mode_goes_on():
    for weight_sync, is_training in (("copy", True), ("shared", False)):
        model = tiny_model().train(is_training)
        with RolloutGenerator(model, RolloutConfig(weight_sync=weight_sync)) as generator:
            generator.manager.start()
            long = SamplingParams(max_new_tokens=300, ignore_eos=True)
            request_id = generator.manager.add_request([5, 6], sampling_params=long)
            generator.generate_batch([[7, 8]], sampling_params=PARAMS)
            assert len(generator.manager.get_result(request_id).generated_tokens) == 300
