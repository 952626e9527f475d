"""One process of several that roll out alike models, dealing their prompts among themselves."""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny import char_tokenizer, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

STUCK_SECONDS = 280
# Past this a process ends itself and says where it waited.

PROMPTS = [[[5, 6, 7], [8, 9], [5, 6, 7, 8]], [[10, 11]]]
# Of each process; the first has more, and longer ones.


def rolled_out(generator: RolloutGenerator, rank: int, **settings: Any) -> dict[str, Any]:
    """Tokens and log-probabilities of this process's own prompts, and what ran here."""
    params = SamplingParams(max_new_tokens=24 if rank == 0 else 8, **settings)
    outputs = generator.generate_batch(
        PROMPTS[rank], sampling_params=params, num_return_sequences=4
    )
    return {
        "prompts": [o.prompt_ids for o in outputs.values()],
        "tokens": [o.generated_tokens for o in outputs.values()],
        "logprobs": [o.logprobs for o in outputs.values()],
        "ids": list(outputs) == [o.request_id for o in outputs.values()],
        "metrics": generator.metrics(),
        "drift": generator.verify(3).max,
    }


def main() -> None:
    """At home, then dealt; twice each, for lengths are known the second time."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    dist.init_process_group("gloo")
    rank, tokenizer = dist.get_rank(), char_tokenizer()
    results: dict[str, Any] = {}
    for name, balance_ranks in (("home", False), ("dealt", True)):
        model = tiny_model(vocab_size=len(tokenizer), eos_token_id=None)
        # Without an accelerator every process has the same seeds, unless the config's differ.
        config = RolloutConfig(seed=rank, balance_ranks=balance_ranks)
        with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
            results[name] = rolled_out(generator, rank)
            results[f"{name}_again"] = rolled_out(generator, rank, stop=["77", "a"])
    Path(sys.argv[-1]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
