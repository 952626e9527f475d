"""Write docs/adapters.md: how each adapter method of PEFT works with the engine.

python scripts/pages/adapter_methods.py    # a few minutes on one core
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from adapters import INVOCATION, METHODS, adapted  # noqa: E402 - a file of the tests
from tiny import largest_difference, plain_logprobs  # noqa: E402

from cb_rollout import (  # noqa: E402
    GenerationOutput,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)

PAGE = """# Adapters

How every adapter method of PEFT {version} works with rollouts and the packed loss, tested on a
tiny Llama whose adapter weights are far from their initial values. In short: plain LoRA works
everywhere, most other methods work with `weight_sync="shared"`, and prompt-learning methods do not
work.

- *shared*: the adapter runs unmerged (`weight_sync="shared"`).
- *copy*: the adapter is merged into the engine's copy of the weights (`weight_sync="copy"`).
- *packed*: `packed_logprobs`, and the packed loss of `attach`.

A number in the table is the largest difference, in nats, between a sampled token's log-probability
and a plain forward *of the object that you hold*: the `PeftModel`, with everything that its forward
does. A sentence is the error that you get with this method.

When you make an engine, it compares the forward of your object with that of the module inside. If
the wrapper adds a computation of its own, you get an error. `attach` and `packed_logprobs` do the
same.

`scripts/pages/adapter_methods.py` wrote this page. AdaMSS needs scikit-learn and has not been
tested.

| method | shared | copy | packed |
|---|---|---|---|
{table}
"""

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=1)
PROMPTS = [[5, 6, 7, 8, *INVOCATION, 9, 10, 11], [5, 6, 7, 8]]


def main() -> None:
    """Try each method, and write the page."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for method in METHODS:
        shared = partial(_sampled, weight_sync="shared")
        copied = partial(_sampled, weight_sync="copy")
        cells = [_outcome(measure, method) for measure in (shared, copied, _packed)]
        rows.append(f"| {method} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    page = PAGE.format(version=peft.__version__, table="\n".join(rows))
    (ROOT / "docs" / "adapters.md").write_text(page)


def _outcome(measure: Callable[[Any], float], method: str) -> str:
    """Return a difference in nats, or the first line of the refusal."""
    with tempfile.TemporaryDirectory() as folder:
        model = adapted(method, Path(folder))
    try:
        return f"{measure(model):.1e}"
    except RolloutError as error:
        first_line, *_ = str(error).splitlines()
        return first_line.replace("|", "\\|")


def _sampled(model: torch.nn.Module, weight_sync: str) -> float:
    config = RolloutConfig(seed=0, weight_sync=weight_sync)
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(PROMPTS, num_return_sequences=2, sampling_params=PARAMS)
    return largest_difference(model, outputs.values())


def _packed(model: torch.nn.Module) -> float:
    outputs = [
        GenerationOutput(f"row {number}", prompt, [20, 21 + number, 22], [0.0, 0.0, 0.0])
        for number, prompt in enumerate((PROMPTS[0], *PROMPTS))
    ]
    packed = packed_logprobs(model, outputs)
    differences = [0.0]
    for output, logprobs_T in zip(outputs, packed, strict=True):
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        differences += [
            abs(ours - theirs) for ours, theirs in zip(logprobs_T.tolist(), plain, strict=True)
        ]
    return max(differences)


if __name__ == "__main__":
    main()
