"""Generate with vLLM, in a process and an environment of its own.

A script of the standard library and vLLM, which imports nothing of this package. It reads a line of
JSON, answers with one, and waits for the next, without an engine that polls. The first line has the
arguments of `vllm.LLM`; the answer has the version. Each further line has `prompts` and `lengths`;
the answer has the number of tokens and of log-probabilities of each completion. With `sampling`,
settings of `vllm.SamplingParams`, it has the tokens and log-probabilities themselves.
"""

import importlib
import json
import os
import sys
from typing import IO, Any


def main() -> None:
    """Answer every line of the standard input."""
    # vLLM logs to the standard output, which is kept for answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        _answer_all(sys.stdin, answers)


def _answer_all(requests: IO[str], answers: IO[str]) -> None:
    def answer(values: dict[str, Any]) -> None:
        answers.write(f"{json.dumps(values)}\n")
        answers.flush()

    # Type checkers do not find vLLM here.
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(**json.loads(requests.readline()))
    answer({"version": vllm.__version__})
    for line in requests:
        answer(_generate(vllm, llm, **json.loads(line)))


def _generate(
    vllm: Any,
    llm: Any,
    prompts: list[list[int]],
    lengths: list[int],
    sampling: dict[str, Any] | None = None,
) -> dict[str, list[Any]]:
    # As after a weight sync: the keys of the run before are of old weights.
    assert llm.reset_prefix_cache(), "the prefix cache could not be emptied"
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            # 0: no log-probabilities besides the sampled token's.
            vllm.SamplingParams(
                **{"temperature": 1.0} | (sampling or {}),
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for length in lengths
        ],
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    if sampling is not None:
        tokens = [list(completion.token_ids) for completion in completions]
        pairs = zip(tokens, completions, strict=True)
        logprobs = [
            [own[token].logprob for token, own in zip(ids, completion.logprobs, strict=True)]
            for ids, completion in pairs
        ]
        return {"tokens": tokens, "logprobs": logprobs}
    return {
        "num_tokens": [len(completion.token_ids) for completion in completions],
        "num_logprobs": [len(completion.logprobs) for completion in completions],
    }


if __name__ == "__main__":
    main()
