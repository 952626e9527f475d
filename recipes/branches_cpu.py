"""Completions that branch: GRPO on trees, with advantages by branch.

For each prompt the model writes four completions. Each forks where the model was least certain of a
token, and the fork is written to its end too. A token after a fork is rewarded against the branches
of that fork alone, a token before it by what its branches earn on average. What branches share is
sampled once, and the loss computes it once. Task and model are those of arithmetic_cpu.py.

Launch:   python recipes/branches_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network
Minutes:  about two
Prints last: held-out accuracy before and after training, and the share of sampled tokens that
branches have in common.
"""

import argparse
import random
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
from arithmetic_cpu import (
    WARMUP_STEPS,
    create_model,
    create_tokenizer,
    create_trainer,
    draw_problems,
    warm_start,
)

from cb_rollout import RolloutConfig, attach, detach, make_rollout_func

generate = make_rollout_func()
shares: list[float] = []


def branching(prompts, trainer) -> dict:
    """Write half of the completions of each prompt, and a fork of each."""
    if not trainer.model.training:
        return generate(prompts, trainer)
    # TRL repeats each prompt for its completions.
    first = generate(prompts[::2], trainer)
    ids, completions, logprobs = (
        first[name] for name in ("prompt_ids", "completion_ids", "logprobs")
    )
    forks = [min(range(len(values)), key=values.__getitem__) for values in logprobs]
    begun = [
        [*prompt, *tokens[:at]] for prompt, tokens, at in zip(ids, completions, forks, strict=True)
    ]
    second = generate(begun, trainer)
    shares.append(sum(forks) / sum(map(len, completions)))
    rows = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for n, at in enumerate(forks):
        rows["prompt_ids"] += [ids[n], ids[n]]
        rows["completion_ids"] += [
            completions[n], [*completions[n][:at], *second["completion_ids"][n]]
        ]  # fmt: skip
        rows["logprobs"] += [logprobs[n], [*logprobs[n][:at], *second["logprobs"][n]]]
    return rows


def by_branch(rows, advantages: torch.Tensor) -> torch.Tensor:
    """Give each token the mean advantage of the rows after it, less that at the last fork."""
    groups = defaultdict(list)
    for row, advantage in zip(rows, advantages.tolist(), strict=True):
        for end in range(len(row.completion_ids) + 1):
            groups[(*row.prompt_ids, None, *row.completion_ids[:end])].append(advantage)
    by_token = torch.zeros(len(rows), max(len(row.completion_ids) for row in rows))
    for number, row in enumerate(rows):
        begin = (*row.prompt_ids, None)
        before, base = groups[begin], mean(groups[begin])
        for end, token in enumerate(row.completion_ids, 1):
            begin = (*begin, token)
            after = groups[begin]
            if len(after) < len(before):
                base = mean(before)
            by_token[number, end - 1] = mean(after) - base
            before = after
    return by_token


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/branches"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=40, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    return parser.parse_args()


def main() -> None:
    args = parsed_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, args.warmup_steps, rng)

    trainer = create_trainer(model, tokenizer, train, held_out, args)
    trainer.rollout_func = branching
    attach(trainer, RolloutConfig(seed=args.seed), token_advantages=by_branch)
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    detach(trainer)
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")
    print(f"sampled tokens that branches share {mean(shares):.0%}")


if __name__ == "__main__":
    main()
