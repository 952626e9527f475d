"""Write docs/architectures.md from the check that tests/families runs on every type.

python scripts/pages/architectures.py    # some minutes on one core
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
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

ROOT = Path(__file__).parents[2]

# Types whose tiny model would once answer with its image token, which is never sampled.
ANSWERS_WITH_IMAGES = ("mistral_large4",)
sys.path[:0] = [str(ROOT / "tests" / "families"), str(ROOT / "tests")]

import configs  # noqa: E402 - a folder of the tests
import image_needs  # noqa: E402
import image_parity  # noqa: E402
import multimodal  # noqa: E402
from configs import ENCODERS, OWN_GENERATE  # noqa: E402
from parity import TOLERANCE, Parity, check, create_model  # noqa: E402

PAGE = """# Architectures

Search this page for your model's `model_type`. It lists every type that transformers {version}
maps to a causal language model, or to a model that also reads images, videos or sounds, and says
whether the engine runs it. For each type, the check creates a tiny random model. It completes
several prompts and a group at once, changes the weights midway, and allows so few cache blocks that
some sequences are preempted.

- *difference*: the largest difference, in nats, between a sampled token's log-probability and the
  model's plain forward (no cache, no padding, float32). The bound is 1e-5, or four times the
  plain forward's own float32 rounding if that is larger. Greedy tokens equal those of the plain
  forward and of `generate`.
- *rows*: the batch layout. *packed*: one forward for all rows, prompts without padding; *padded*:
  one forward for all rows, left-padded; *equal_lengths*: one forward for rows of one length;
  *single_rows*: one forward for each row. An engine tries these in order when it is made, and
  refuses a model that agrees with its plain forward in none.

`scripts/pages/architectures.py` wrote this page with torch {torch_version} on {machine}.

## Causal language models

{num_running} of {num_types} run. An encoder runs with `is_decoder=True` in its config, and is
refused without it.

{table}

## Images, videos and sounds

These types are checked on text only, as `AutoModelForMultimodalLM` loads them (image-text-to-text
types among them). {num_multimodal_running} of {num_multimodal} run. [Images](images.md) are checked
for the {num_image_types} types that transformers maps to image-text-to-text; videos and sounds are
refused.

- *images*: the largest difference from the plain forward with the same images, for prompts with
  no, one and two images, greedy and in groups. {num_images_running} agree. Greedy tokens equal
  those of `generate`. An empty cell: not mapped to image-text-to-text, or refused on text.

{multimodal_table}
"""

TABLE = """| type | status | difference | rows | remark |
|---|---|---|---|---|
"""

IMAGES_TABLE = """| type | status | difference | rows | images | remark |
|---|---|---|---|---|---|
"""


def remark(model_type: str, found: Parity) -> str:
    """Return the remark on a type that runs."""
    remarks = ["with `is_decoder=True`"] if model_type in ENCODERS else []
    if model_type in OWN_GENERATE:
        remarks.append(OWN_GENERATE[model_type])
    if model_type in ANSWERS_WITH_IMAGES:
        remarks.append(
            "at one point in the check its likeliest token is the image token, which is never "
            "sampled"
        )
    if found.drift > TOLERANCE:
        remarks.append(f"its plain forward is itself {found.rounding:.0e} off float64")
    return f" {'; '.join(remarks)}" if remarks else ""


def images_cell(model_type: str) -> str:
    """Return what the check of a type's images found."""
    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return ""
    for reasons, status in (
        (image_needs.REFUSED, "refused"),
        (image_needs.NO_PROCESSOR, "not checked"),
    ):
        if model_type in reasons:
            return f"{status}: {reasons[model_type]}"
    found = image_parity.check(model_type)
    if found.drift > found.tolerance or not found.is_as_generate:
        raise SystemExit(f"{model_type} is {found.drift:.1e} nats off with images: {found}")
    return f"{found.drift:.0e}"


def row(model_type: str, auto_class: Any, tables: ModuleType) -> str:
    """Return a type's row of the table."""
    reads_images = tables is multimodal
    for reasons, status in ((tables.REFUSED, "refused"), (tables.NOT_BUILT, "not built")):
        if model_type in reasons:
            cells = [f"`{model_type}`", status, "", "", *([""] if reads_images else [])]
            return f"| {' | '.join(cells)} | {reasons[model_type]} |"
    found = check(create_model(model_type, auto_class))
    margin = 0.0 if model_type in ANSWERS_WITH_IMAGES else found.margin
    if max(found.drift, margin) > found.tolerance:
        raise SystemExit(f"{model_type} is {found.drift:.1e} nats off: {found}")
    cells = [f"`{model_type}`", "runs", f"{found.drift:.0e}", found.batch_layout]
    if reads_images:
        cells.append(images_cell(model_type))
    return f"| {' | '.join(cells)} |{remark(model_type, found)} |"


def table(types: Iterable[str], auto_class: Any, tables: ModuleType) -> str:
    """Check every type; return the table."""
    rows = []
    for model_type in sorted(types):
        rows.append(row(model_type, auto_class, tables))
        print(rows[-1], flush=True)
    return (IMAGES_TABLE if tables is multimodal else TABLE) + "\n".join(rows)


def is_figure(cell: str) -> bool:
    """Tell whether a cell has a number."""
    return cell.strip()[:1].isdigit()


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
        num_image_types=len(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        num_images_running=sum(is_figure(line.split("|")[5]) for line in reading.splitlines()),
        multimodal_table=reading,
    )
    (ROOT / "docs" / "architectures.md").write_text(page)


if __name__ == "__main__":
    main()
