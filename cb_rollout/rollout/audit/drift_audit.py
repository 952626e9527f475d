"""Audit sequences while a trainer trains.

Owns the limits on what an audit may cost. Adds the text of an audit to the run's records. Logs an
exception of an audit instead of raising it. Called by the thread that trains.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import shards_models
from cb_rollout.engine.memory.device import memory
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.metrics.run_records import RUN_DIR_NAME, record_audit
from cb_rollout.rollout.audit.auditor import audit
from cb_rollout.rollout.audit.report import AuditReport
from cb_rollout.types import GenerationOutput

# Sequences, and tokens of each: enough to find a cause whose effect is larger than rounding.
MAX_SEQUENCES = 4
MAX_TOKENS = 128

# Copies that an audit holds at a time: of the weights, besides the versions, and of the logits.
WEIGHT_COPIES = 2
LOGIT_COPIES = 8

_LOGGER = logging.getLogger(__name__)


def holds_whole_model(trainer: Any) -> bool:
    """Return whether each process holds the whole model; only such a model can be audited."""
    is_split = ModelFacts.of(trainer.model).is_split
    return not (is_split or shards_models(trainer.accelerator))


def audit_drift(
    outputs: Sequence[GenerationOutput], trainer: Any, **arguments: Any
) -> AuditReport | None:
    """Return why log-probabilities differ from a trainer's; None: the audit failed or did not run.

    It does not run without outputs, or if memory is short. Takes the arguments of `audit`. Looks at
    the first `MAX_SEQUENCES` sequences, which should have at most `MAX_TOKENS` tokens each.
    """
    report = None
    model = trainer.model
    versions = arguments.get("versions") or {}
    arguments["tokenizer"] = trainer.processing_class
    arguments["max_tokens"] = MAX_SEQUENCES * MAX_TOKENS
    try:
        if outputs and _has_room(model, WEIGHT_COPIES + len(versions)):
            with trainer.accelerator.autocast():
                report = audit(outputs[:MAX_SEQUENCES], model, **arguments)
            # The trainer counts a step once it is done.
            text = f"Step {trainer.state.global_step + 1:,}. {report}"
            _LOGGER.info("%s", text)
            if trainer.accelerator.is_main_process:
                record_audit(Path(trainer.args.output_dir) / RUN_DIR_NAME, text)
    except Exception:
        # An audit only explains the run's numbers, so its failure must not end the run.
        _LOGGER.info("the drift could not be audited, or not recorded", exc_info=True)
    return report


def _has_room(model: torch.nn.Module, num_copies: int) -> bool:
    inner = hf_compat.unwrap(model)
    weights = list(inner.parameters())
    num_bytes = num_copies * sum(weight.nbytes for weight in weights)
    num_logits = MAX_SEQUENCES * MAX_TOKENS * hf_compat.vocab_size(inner)
    num_bytes += LOGIT_COPIES * num_logits * torch.float32.itemsize
    free_bytes = memory(weights[0].device).free_bytes
    if num_bytes > free_bytes:
        _LOGGER.info("no audit of the drift: %d bytes needed, %d free", num_bytes, free_bytes)
    return num_bytes <= free_bytes
