"""One process of several that train one model together and roll it out after every step.

Writes, for each way of distributing it, how far the rollouts are from a plain model that one
process trains on the same batches. Run by `processes.run_processes`.
"""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import plain_logprobs, tiny_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

BATCH = torch.randint(3, 256, (4, 16), generator=torch.Generator().manual_seed(0))
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
NUM_STEPS = 3


def plain(**settings: Any) -> torch.nn.Module:
    """The model in one piece."""
    return tiny_model(**settings)


def with_lora() -> torch.nn.Module:
    """The model with adapters, equal on every process."""
    torch.manual_seed(0)
    return get_peft_model(plain(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))


def sharded(model: Any, **settings: Any) -> Any:
    """`model` under FSDP2, a layer a unit; a PEFT wrapper is the root, as accelerate makes it."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    for layer in base.model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step on the batch, the same on every process."""
    model.train()
    loss = model(input_ids=BATCH, labels=BATCH).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def local_parts(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """This process's parts of the parameters, copied."""
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return [part.detach().clone() for part in parts]


def follow(model: Any, reference: Any, config: RolloutConfig) -> dict[str, Any]:
    """Train both, roll the distributed one out after every step, and compare."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (model, reference)
    ]
    rank = dist.get_rank()
    # Those that the optimizer steps, whatever the modules show later.
    parameters = list(model.parameters())
    before = plain_logprobs(reference, [5, 6], [7, 8, 9])
    differences, drifts, parts_kept, num_bytes = [], [], True, []
    with RolloutGenerator(model, config) as generator:
        for step in range(NUM_STEPS):
            for trained, optimizer in zip((model, reference), optimizers, strict=True):
                train_step(trained, optimizer)
            # As a trainer does for old log-probabilities; leaves the root's parameters whole.
            if step % 2:
                with torch.no_grad():
                    model(input_ids=BATCH)
            report = generator.sync_weights()
            num_bytes.append(report.bytes_copied)
            parts = local_parts(parameters)
            # Ranks roll out different prompts, and unequally many.
            prompts = [[5 + rank, 6, 7], [8, 9], [10 + rank]][: 2 + rank]
            outputs = generator.generate_batch(prompts, sampling_params=PARAMS).values()
            reference.eval()
            differences += [
                abs(a - b)
                for o in outputs
                for a, b in zip(
                    o.logprobs,
                    plain_logprobs(reference, o.prompt_ids, o.generated_tokens),
                    strict=True,
                )
            ]
            drifts.append(generator.verify(3).max)
            generator.sync_weights()
            same = [torch.equal(a, b) for a, b in zip(parts, local_parts(parameters), strict=True)]
            parts_kept = parts_kept and all(same)
        is_shared = generator.manager.engine.model is generator.manager.engine.trained
        # Every process takes part in the model's forward.
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=BATCH).logits
            own = generator.manager.engine.model(input_ids=BATCH).logits
        generator.sync_weights()
        head = generator.manager.engine.model.lm_head.weight
    after = plain_logprobs(reference, [5, 6], [7, 8, 9])
    return {
        "difference": max(differences),
        "drift": max(drifts),
        "moved": max(abs(a - b) for a, b in zip(before, after, strict=True)),
        "parts_kept": parts_kept,
        "bytes_copied": num_bytes,
        "is_shared": is_shared,
        "head_is_rounded": torch.equal(head, head.bfloat16().to(head.dtype)),
        "forwards_equal": torch.equal(logits, own.to(logits.dtype)),
    }


STUCK_SECONDS = 60
# Past this a process ends itself and says where it waited.


def main() -> None:
    """Every way, one after the other."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    dist.init_process_group("gloo")
    checked = RolloutConfig(seed=dist.get_rank(), verify_weight_sync=True)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    exact = replace(checked, weight_sync="copy", rollout_dtype="float32")
    tied = {"tie_word_embeddings": True}
    results = {
        "fsdp2": follow(sharded(plain()), plain(), checked),
        "fsdp2_root": follow(fully_shard(plain()), plain(), checked),
        "fsdp2_tied": follow(sharded(plain(**tied)), plain(**tied), checked),
        "fsdp2_bf16": follow(sharded(plain(), mp_policy=half), plain(), checked),
        "fsdp2_bf16_exact": follow(sharded(plain(), mp_policy=half), plain(), exact),
        "fsdp2_lora": follow(sharded(with_lora()), with_lora(), checked),
        "ddp": follow(DistributedDataParallel(plain()), plain(), checked),
    }
    Path(sys.argv[-1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
