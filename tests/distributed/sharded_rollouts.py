"""One process of several that train one model together and roll it out after every step.

Writes, for each way of distributing it, how far the rollouts are from a plain model that one
process trains on the same batches. Run by `processes.run_processes`.
"""

import copy
import faulthandler
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import plain_logprobs, tiny_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cb_rollout import (
    ConfigurationError,
    GenerationOutput,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)
from cb_rollout.compat.fsdp import local_part

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


def fsdp1(model: Any, **settings: Any) -> FullyShardedDataParallel:
    """`model` under FSDP1, a layer a unit."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(base.model.layers[0])}),
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **settings},
    )


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Over what trains."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def stepping(model: Any) -> Callable[[], None]:
    """What takes one step on the batch, the same on every process."""
    optimizer = sgd(model)

    def step() -> None:
        model.train()
        model(input_ids=BATCH, labels=BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor whole, by torch's own way of saving a model."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def local_parts(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """This process's parts of the parameters, copied."""
    parts = [
        p.to_local() if isinstance(p, DTensor) else getattr(p, "ds_tensor", p) for p in parameters
    ]
    return [part.detach().clone() for part in parts]


def follow(
    model: Any,
    reference: Any,
    config: RolloutConfig,
    step_of: Callable[[Any], Callable[[], None]] = stepping,
    gather: Callable[[Any], dict[str, torch.Tensor]] = gathered,
    level: int = 0,
) -> dict[str, Any]:
    """Train both, roll the distributed one out after every step, and compare.

    `level`: of the sleep before each step; 0: none.
    """
    steps = (step_of(model), stepping(reference))
    rank = dist.get_rank()
    # Those that the optimizer steps, whatever the modules show later.
    parameters = list(model.parameters())
    before = plain_logprobs(reference, [5, 6], [7, 8, 9])
    differences, apart, drifts, parts_kept, num_bytes, num_unequal = [], [], [], True, [], 0
    asleep: set[int] = set()
    # Holds the gathered weights; adapters are held against the reference alone.
    probe = reference if hasattr(reference, "peft_config") else copy.deepcopy(reference).eval()
    has_adapters = hasattr(reference, "peft_config")
    with RolloutGenerator(model, config) as generator:
        copied = list(generator.manager.model.parameters())
        identity = [local.untyped_storage()._cdata for local in map(local_part, copied)]
        for step in range(NUM_STEPS):
            if level:
                generator.sleep(level)
                asleep |= {local_part(p).untyped_storage().nbytes() for p in copied}
            for train in steps:
                train()
            # As a trainer does for old log-probabilities; leaves the root's parameters whole.
            if step % 2:
                with torch.no_grad():
                    model(input_ids=BATCH)
            report = generator.sync_weights()
            num_bytes.append(report.bytes_copied)
            parts = local_parts(parameters)
            if not has_adapters:
                held, whole = generator.manager.model.state_dict(), gather(model)
                probe.load_state_dict(whole)
                num_unequal += len(held.keys() ^ whole.keys()) + sum(
                    not torch.equal(held[name], whole[name].to(held[name].dtype))
                    for name in held.keys() & whole.keys()
                )
            # Ranks roll out different prompts, and unequally many.
            prompts = [[5 + rank, 6, 7], [8, 9], [10 + rank]][: 2 + rank]
            outputs = generator.generate_batch(prompts, sampling_params=PARAMS).values()
            reference.eval()
            for trained, found in ((probe, differences), (reference, apart)):
                for o in outputs:
                    wanted = plain_logprobs(trained, o.prompt_ids, o.generated_tokens)
                    found += [abs(a - b) for a, b in zip(o.logprobs, wanted, strict=True)]
            drifts.append(generator.verify(3).max)
            generator.sync_weights()
            same = [torch.equal(a, b) for a, b in zip(parts, local_parts(parameters), strict=True)]
            parts_kept = parts_kept and all(same)
        is_shared = not generator.manager.engine.training_model.is_copied
        # Every process takes part in the model's forward.
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=BATCH).logits
            own = generator.manager.model(input_ids=BATCH).logits
        generator.sync_weights()
        head = generator.manager.model.lm_head.weight
        if not rank and not is_shared:
            with torch.no_grad():
                generator.manager.model.model.norm.weight[3] += 1
        spoiled = generator._weights.differing()
    after = plain_logprobs(reference, [5, 6], [7, 8, 9])
    return {
        "difference": max(differences),
        "apart": max(apart),
        "asleep": sorted(asleep),
        "is_same": identity == [local_part(p).untyped_storage()._cdata for p in copied],
        "drift": max(drifts),
        "moved": max(abs(a - b) for a, b in zip(before, after, strict=True)),
        "parts_kept": parts_kept,
        "bytes_copied": num_bytes,
        "num_unequal": num_unequal,
        "spoiled": spoiled,
        "is_shared": is_shared,
        "head_is_rounded": torch.equal(head, head.bfloat16().to(head.dtype)),
        "forwards_equal": torch.equal(logits, own.to(logits.dtype)),
    }


def outputs_of(rank: int) -> list[GenerationOutput]:
    """Other outputs for each process, and other numbers of them, that share a prompt."""
    tokens = torch.randint(3, 256, (3, 6), generator=torch.Generator().manual_seed(rank)).tolist()
    return [GenerationOutput(str(n), [5, 6, 7], row) for n, row in enumerate(tokens[: 2 + rank])]


def packed_gradients(**settings: Any) -> float:
    """How far gradients of packed log-probabilities under DDP are from the mean over processes."""
    distributed, alone = DistributedDataParallel(plain(), **settings), plain()
    for _ in range(2):
        distributed.zero_grad()
        own = packed_logprobs(distributed, outputs_of(dist.get_rank()))
        torch.cat(own).sum().backward()
    for rank in range(dist.get_world_size()):
        for o in outputs_of(rank):
            ids = torch.tensor([o.prompt_ids + o.generated_tokens])
            logprobs = alone(input_ids=ids).logits.log_softmax(-1)[:, 2:-1]
            labels = ids[:, 3:, None]
            (logprobs.gather(-1, labels).sum() / dist.get_world_size()).backward()
    pairs = zip(distributed.module.parameters(), alone.parameters(), strict=True)
    return max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)


def drawn(model: torch.nn.Module) -> list[int]:
    """The tokens of a prompt and a seed that every process has, with nothing said of ranks."""
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        (output,) = generator.generate_batch([[5, 6, 7]], sampling_params=PARAMS).values()
    return output.generated_tokens


def refusal(call: Callable[[], Any]) -> str:
    """What is said against a call."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return ""


STUCK_SECONDS = 280
# Past this a process ends itself and says where it waited.


def main() -> None:
    """Every way that was named, one after the other."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    dist.init_process_group("gloo")
    checked = RolloutConfig(seed=dist.get_rank(), verify_weight_sync=True)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half1 = MixedPrecision(param_dtype=torch.bfloat16)
    exact = replace(checked, weight_sync="copy", rollout_dtype="float32")
    copied = replace(checked, weight_sync="copy")
    tied = {"tie_word_embeddings": True}
    *ways, path = sys.argv[1:]
    every_way: dict[str, Callable[[], dict[str, Any]]] = {
        "fsdp2": lambda: follow(sharded(plain()), plain(), checked),
        "fsdp2_slept": lambda: follow(sharded(plain()), plain(), checked, level=2),
        "fsdp2_tied_slept": lambda: follow(sharded(plain(**tied)), plain(**tied), checked, level=2),
        "fsdp2_lora_slept": lambda: follow(sharded(with_lora()), with_lora(), checked, level=2),
        "fsdp1_slept": lambda: follow(fsdp1(plain()), plain(), checked, level=2),
        "fsdp2_root": lambda: follow(fully_shard(plain()), plain(), checked),
        "fsdp2_tied": lambda: follow(sharded(plain(**tied)), plain(**tied), checked),
        "fsdp2_bf16": lambda: follow(sharded(plain(), mp_policy=half), plain(), checked),
        "fsdp2_bf16_exact": lambda: follow(sharded(plain(), mp_policy=half), plain(), exact),
        "fsdp1": lambda: follow(fsdp1(plain()), plain(), checked),
        "fsdp1_tied": lambda: follow(fsdp1(plain(**tied)), plain(**tied), checked),
        "fsdp1_bf16": lambda: follow(fsdp1(plain(), mixed_precision=half1), plain(), checked),
        "fsdp1_lora": lambda: follow(fsdp1(with_lora()), with_lora(), checked),
        "fsdp2_lora": lambda: follow(sharded(with_lora()), with_lora(), checked),
        "ddp": lambda: follow(DistributedDataParallel(plain()), plain(), checked),
        "ddp_copy": lambda: follow(DistributedDataParallel(plain()), plain(), copied),
        "plain": lambda: follow(plain(), plain(), checked),
        "plain_copy": lambda: follow(plain(), plain(), copied),
    }
    results: dict[str, Any] = {way: every_way[way]() for way in ways}
    results["drawn"] = drawn(DistributedDataParallel(plain()))
    own = fsdp1(plain(), use_orig_params=False)
    results["refusal"] = refusal(lambda: RolloutGenerator(own))
    parted = sharded(plain())
    results["packed_refusal"] = refusal(lambda: packed_logprobs(parted, outputs_of(0)))
    results["packed"] = [packed_gradients(), packed_gradients(static_graph=True)]
    Path(path).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
