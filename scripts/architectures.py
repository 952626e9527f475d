"""Write docs/architectures.md from the check that tests/families runs on every type.

python scripts/architectures.py    # some minutes on one core
"""

import logging
import platform
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "families"))

import configs  # noqa: E402 - a folder of the tests
import multimodal  # noqa: E402
from configs import ENCODERS, OWN_GENERATE  # noqa: E402
from parity import TOLERANCE, Parity, check, create_model  # noqa: E402

PAGE = """# Architectures

Each type that transformers {version} maps to a causal language model, or to a model that also reads
images, videos or sounds, and whether it runs in the engine. For each type the check makes a tiny
random model. It generates several prompts and a forked group at once, with too few blocks, so that
some sequences are preempted, while the weights change.

- *difference*: the largest difference, in nats, between a sampled token's log-probability and the
  model's plain forward (no cache, no padding, float32). The bound is 1e-5, or four times the
  plain forward's own float32 rounding if that is larger. Greedy tokens equal those of the plain
  forward and of `generate`.
- *rows*: the batch layout. *packed*: one forward for all rows, prompts without padding; *padded*:
  one forward for all rows, left-padded; *equal_lengths*: one forward for rows of one length;
  *single_rows*: one forward for each row. An engine tries these in turn when it is made. It refuses
  a model that agrees with its plain forward in none.

`scripts/architectures.py` wrote this page with torch {torch_version} on {machine}.

## Causal language models

{num_running} of {num_types} run. An encoder runs with `is_decoder=True` in its config, and is
refused without.

{table}

## Images, videos and sounds

These types are checked on text alone, as `AutoModelForMultimodalLM` loads them (image-text-to-text
types among them). {num_multimodal_running} of {num_multimodal} run. Images and sounds are not
supported.

{multimodal_table}
"""

TABLE = """| type | status | difference | rows | remark |
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


def row(model_type: str, auto_class: Any, tables: ModuleType) -> str:
    """Return a type's row of the table."""
    for reasons, status in ((tables.REFUSED, "refused"), (tables.NOT_BUILT, "not built")):
        if model_type in reasons:
            return f"| `{model_type}` | {status} | | | {reasons[model_type]} |"
    found = check(create_model(model_type, auto_class))
    if max(found.drift, found.margin) > found.tolerance:
        raise SystemExit(f"{model_type} is {found.drift:.1e} nats off: {found}")
    cells = (f"`{model_type}`", "runs", f"{found.drift:.0e}", found.batch_layout)
    return f"| {' | '.join(cells)} |{remark(model_type, found)} |"


def table(types: Iterable[str], auto_class: Any, tables: ModuleType) -> str:
    """Check every type; return the table."""
    rows = []
    for model_type in sorted(types):
        rows.append(row(model_type, auto_class, tables))
        print(rows[-1], flush=True)
    return TABLE + "\n".join(rows)


def main() -> None:
    """Check every type and write the document."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    causal = table(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM, configs)
    reading = table(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, AutoModelForMultimodalLM, multimodal)
    page = PAGE.format(
        version=transformers.__version__,
        torch_version=torch.__version__,
        machine=platform.machine(),
        num_running=causal.count("| runs |"),
        num_types=len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        table=causal,
        num_multimodal_running=reading.count("| runs |"),
        num_multimodal=len(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES),
        multimodal_table=reading,
    )
    (ROOT / "docs" / "architectures.md").write_text(page)


if __name__ == "__main__":
    main()
