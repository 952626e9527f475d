"""Write docs/architectures.md from the check that tests/families runs on every type.

python scripts/architectures.py    # some minutes on one core
"""

import logging
import platform
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "families"))

from configs import ENCODERS, NOT_BUILT, OWN_GENERATE, REFUSED  # noqa: E402 - a folder of the tests
from parity import TOLERANCE, Parity, check, create_model  # noqa: E402

HEADER = """# Architectures

Each type that transformers {version} maps to a causal language model, and whether it runs in the
engine. For each type the check makes a tiny random model. It generates several prompts and a
forked group at once, with too few blocks, so that some sequences are preempted, while the weights
change.

- *difference*: the largest difference, in nats, between a sampled token's log-probability and the
  model's plain forward (no cache, no padding, float32). The bound is 1e-5, or four times the
  plain forward's own float32 rounding if that is larger. Greedy tokens equal those of the plain
  forward and of `generate`.
- *rows*: the batch layout. *padded*: one forward for all rows; *equal_lengths*: one forward for
  rows of one length; *single_rows*: one forward for each row. An engine tries these in turn when it
  is made. It refuses a model that agrees with its plain forward in none.

{num_running} of {num_types} run. An encoder runs with `is_decoder=True` in its config, and is
refused without.

`scripts/architectures.py` wrote this page with torch {torch_version} on {machine}.

| type | status | difference | rows | remark |
|---|---|---|---|---|
"""


def remark(model_type: str, found: Parity) -> str:
    """Return the remark on a type that runs."""
    remarks = ["with `is_decoder=True`"] if model_type in ENCODERS else []
    if model_type in OWN_GENERATE:
        remarks.append(OWN_GENERATE[model_type])
    if found.drift > TOLERANCE:
        remarks.append(f"its plain forward is itself {found.rounding:.0e} off float64")
    return f" {'; '.join(remarks)}" if remarks else ""


def row(model_type: str) -> str:
    """Return a type's row of the table."""
    for reasons, status in ((REFUSED, "refused"), (NOT_BUILT, "not built")):
        if model_type in reasons:
            return f"| `{model_type}` | {status} | | | {reasons[model_type]} |"
    found = check(create_model(model_type))
    if max(found.drift, found.margin) > found.tolerance:
        raise SystemExit(f"{model_type} is {found.drift:.1e} nats off: {found}")
    cells = (f"`{model_type}`", "runs", f"{found.drift:.0e}", found.batch_layout)
    return f"| {' | '.join(cells)} |{remark(model_type, found)} |"


def main() -> None:
    """Check every type and write the document."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    types = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows = []
    for model_type in types:
        rows.append(row(model_type))
        print(rows[-1], flush=True)
    header = HEADER.format(
        version=transformers.__version__,
        torch_version=torch.__version__,
        machine=platform.machine(),
        num_running=sum("| runs |" in line for line in rows),
        num_types=len(types),
    )
    (ROOT / "docs" / "architectures.md").write_text(header + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
