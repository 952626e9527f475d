"""One process of several that train one vision-language model under FSDP2 and roll it out.

Writes how far rollouts of the sharded model, and what a stock trainer learns, are from those of a
whole model. Run by `processes.run_processes`.
"""

import copy
import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerated import allow_fsdp
from packed_training import apart, gradients_apart, parts
from playback import play_back, watched
from sharded_rollouts import sgd
from tiny_trainer import logged
from tiny_vision import picture, plain_logprobs, tiny_vision_model
from tiny_vision_trainer import vision_trainer
from torch.distributed.fsdp import fully_shard
from trl_sharded import fsdp

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, attach

NUM_STEPS = 3
LAYERS = {"transformer_layer_cls_to_wrap": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"]}
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=5)
TRAINER = {"max_steps": 2, "per_device_train_batch_size": 4, "optim": "sgd", "learning_rate": 0.05}


def asked(*pictures: Any) -> dict[str, Any]:
    """A prompt with pictures, before or between words."""
    return {"prompt": "w40 " + "<image> w41 " * len(pictures) + "w42", "images": list(pictures)}


def prompts_of(rank: int) -> list[dict[str, Any]]:
    """Prompts with and without pictures, in another order on each process, and one of its own."""
    prompts = [asked(), asked(picture(1)), asked(picture(10 + rank), picture(1, (64, 24)))]
    return [*prompts[rank:], *prompts[:rank]] + [asked(picture(20))] * rank


def processed(processor: Any, prompt: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The processor's tensors of a prompt."""
    images = [prompt["images"]] if prompt["images"] else None
    return dict(processor(text=[prompt["prompt"]], images=images, return_tensors="pt"))


def sharded(model: Any) -> Any:
    """`model` under FSDP2: a layer of the tower, or of the language model, is a unit."""
    for layer in [*model.model.visual.blocks, *model.model.language_model.layers]:
        fully_shard(layer)
    return fully_shard(model)


def stepping(model: Any, processor: Any) -> Callable[[], None]:
    """What takes one step on a picture, the same on every process."""
    optimizer, batch = sgd(model), processed(processor, asked(picture(1)))

    def step() -> None:
        model.train()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()

    return step


def follow() -> dict[str, Any]:
    """Train a sharded model and a whole one, and compare their rollouts after every step."""
    whole, processor = tiny_vision_model("qwen2_5_vl")
    model, before = sharded(copy.deepcopy(whole)), copy.deepcopy(whole)
    steps = [stepping(trained, processor) for trained in (model, whole)]
    prompts = prompts_of(dist.get_rank())
    found: dict[str, Any] = {"differences": [], "same_tokens": [], "encoded": [], "bytes": []}
    config = RolloutConfig(verify_weight_sync=True)
    with (
        RolloutGenerator(model, config, tokenizer=processor) as generator,
        RolloutGenerator(whole, config, tokenizer=processor) as alone,
    ):
        for _ in range(NUM_STEPS):
            for step in steps:
                step()
            found["bytes"].append(generator.sync_weights().bytes_copied)
            alone.sync_weights()
            for _ in range(2):
                outputs, others = (
                    list(g.generate_batch(prompts, sampling_params=PARAMS).values())
                    for g in (generator, alone)
                )
                found["encoded"].append(generator.metrics()["rollout/images_encoded"])
            tokens = [o.generated_tokens for o in outputs]
            found["same_tokens"].append(tokens == [o.generated_tokens for o in others])
            for prompt, output, other in zip(prompts, outputs, others, strict=True):
                tensors = processed(processor, prompt)
                plain = plain_logprobs(whole, tensors, output.generated_tokens)
                for logprobs in (other.logprobs, plain):
                    pairs = zip(output.logprobs, logprobs, strict=True)
                    found["differences"] += [abs(a - b) for a, b in pairs]
            found["drift"] = generator.verify(2).max
            found["num_verified"] = generator.verify(2).num_tokens
        tower = generator.manager.model.model.visual.state_dict()
    trained, first = whole.model.visual.state_dict(), before.model.visual.state_dict()
    found["tower_apart"] = max(float((tower[n] - t).abs().max()) for n, t in trained.items())
    # With the tower as it was before the first step.
    tensors, tokens = processed(processor, asked(picture(1))), [20, 21, 22]
    now = plain_logprobs(whole, tensors, tokens)
    whole.model.visual.load_state_dict(first)
    pairs = zip(now, plain_logprobs(whole, tensors, tokens), strict=True)
    found["effect_of_the_tower"] = max(abs(a - b) for a, b in pairs)
    found["num_images"] = len({p.tobytes() for prompt in prompts for p in prompt["images"]})
    held = [*whole.parameters(), *whole.buffers()]
    found["bytes_of_the_model"] = sum(tensor.nbytes for tensor in held)
    return found


def train(output_dir: Path) -> dict[str, Any]:
    """Train a stock trainer attached, and another one on the same tokens as TRL does."""
    settings = TRAINER | fsdp(2, **LAYERS)
    ours = vision_trainer(output_dir / "ours", **settings)
    assert ours.is_fsdp_enabled
    generator = attach(ours, RolloutConfig(verify_every_steps=1, verify_weight_sync=True))
    record = watched(ours)
    ours.train()
    is_copy = generator.manager.engine.training_model.is_copied
    generator.close()
    theirs = vision_trainer(output_dir / "theirs", **settings)
    reference = play_back(theirs, record.turns)
    theirs.train()
    pairs = zip(record.losses, reference.losses, strict=True)
    return {
        "is_copy": is_copy,
        "drift": logged(ours, "rollout/logprob_drift_max"),
        "shared": logged(ours, "rollout/prompts_shared"),
        "losses": max(abs(a - b) for a, b in pairs),
        "norm": max(logged(theirs, "grad_norm")),
        "gradients": gradients_apart(record, reference),
        "weights": apart(parts(ours.model), parts(theirs.model)),
    }


STUCK_SECONDS = 280
# Past this a process ends itself and says where it waited.


def main() -> None:
    """The loop of one's own, then the trainer."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    path = Path(sys.argv[-1])
    allow_fsdp()
    dist.init_process_group("gloo")
    results = {"loop": follow(), "trainer": train(path.with_suffix(".out"))}
    path.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
