"""Generate for TRL's trainers of distillation and online preferences.

Their losses compute every log-probability themselves, so only generation is replaced. Called by
the trainer, on its thread.

B: rows of a batch, P: columns of the padded prompts, T: columns of the padded completions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cb_rollout.compat.patching import replacing
from cb_rollout.config.enums import Numerics, SamplingMaskMode
from cb_rollout.config.hf import as_rollout_config
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.trl.backend import LOADED, GenerationBackend, create_sampler
from cb_rollout.rollout.sampler import Sampler, SamplerSource


@dataclass(frozen=True, slots=True)
class GenerationSeam:
    """Attributes and methods by which a trainer of TRL 1.16 generates."""

    methods: tuple[str, ...]
    """Methods of the trainer that generate; a call is one rollout."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Attributes that make the methods ask `vllm_generation`; empty: they call `model.generate`."""
    synced_step: str = "_last_loaded_step"


_SYNCED = {"use_vllm": True, "vllm_sync_frequency": 1}

# Seams by the name of TRL's class. A subclass generates as its parent does.
SEAMS = {
    "DistillationTrainer": GenerationSeam(("_generate",), LOADED),
    "GOLDTrainer": GenerationSeam(
        ("_generate_on_policy_for_slices", "_generate_on_policy_vlm_raw"),
        _SYNCED,
        "_last_vllm_sync_step",
    ),
    "IWOPDTrainer": GenerationSeam(
        ("_generate_student_completions",), _SYNCED, "_last_vllm_sync_step"
    ),
    "OnlineDPOTrainer": GenerationSeam(("_generate",)),
    "SDFTTrainer": GenerationSeam(("_generate",), LOADED),
    "SDPOTrainer": GenerationSeam(("_generate",), LOADED),
}


def seam_of(trainer: Any) -> GenerationSeam | None:
    """Return where a trainer generates; None: its class is not in `SEAMS`."""
    for parent in type(trainer).__mro__:
        if parent.__module__.startswith("trl.") and parent.__name__ in SEAMS:
            return SEAMS[parent.__name__]
    return None


def require_generation_alone(trainer: Any, config: Any, seam: GenerationSeam) -> None:
    """Refuse settings that need more of a trainer than its generation."""
    config = as_rollout_config(config)
    name = type(trainer).__name__
    for setting, is_set in (
        ("sampling_mask='replay'", config.sampling_mask == SamplingMaskMode.REPLAY),
        ("router_replay=True", config.router_replay),
        ("numerics='bitwise'", config.numerics == Numerics.BITWISE),
    ):
        if is_set:
            raise ConfigurationError(
                f"{setting} changes the loss, and attach() replaces only the generation of a "
                f"{name}; leave it out."
            )
    if not seam.attributes and getattr(trainer, "is_vision_model", False):
        raise ConfigurationError(
            f"a {name} generates by itself when its model reads images; do not attach it."
        )


def attach_generation(trainer: Any, source: SamplerSource, seam: GenerationSeam) -> Sampler:
    """Attach a trainer whose loss needs nothing from the rollout but its tokens."""
    require_generation_alone(trainer, source.config, seam)
    sampler = create_sampler(trainer, source)
    backend = GenerationBackend(trainer, sampler, synced_step=seam.synced_step)
    _install_generation(trainer, backend, seam)
    backend.install(seam.attributes)
    return sampler


def _install_generation(trainer: Any, backend: GenerationBackend, seam: GenerationSeam) -> None:
    """Make a trainer generate with the backend, until the backend is closed."""
    if not hasattr(trainer, "_metrics"):
        backend.override(
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
            log=_with_metrics(trainer),
        )
    for name in seam.methods:
        method = getattr(trainer, name)
        if not seam.attributes:
            method = _generating(trainer, backend)(method)
        backend.override(**{name: backend.rollout()(method)})


@contextmanager
def _generating(trainer: Any, backend: GenerationBackend) -> Iterator[None]:
    """Generate with the backend when the trainer calls its model's `generate`."""
    backend.sync_once_a_step()
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    with replacing([(model, "generate", partial(_padded_generation, backend))]):
        yield


def _padded_generation(
    backend: GenerationBackend,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    generation_config: Any,
) -> torch.Tensor:
    """Return prompts and sampled completions as `generate` of transformers does, (B, P + T)."""
    prompts = []
    for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
        prompts.append(ids[mask].tolist())
    outputs = backend.sample(prompts)
    completions_BT = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(output.generated_tokens) for output in outputs],
        batch_first=True,
        padding_value=generation_config.pad_token_id,
    )
    return torch.cat([input_ids, completions_BT.to(input_ids)], dim=1)


def _with_metrics(trainer: Any) -> Callable[..., None]:
    """Return `trainer.log` with the means of the rollouts' metrics since its last call."""
    log = trainer.log

    def logged(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        is_evaluation = any(name.startswith("eval_") for name in logs)
        prefix = "eval_" if is_evaluation else ""
        kept = trainer._metrics["eval" if is_evaluation else "train"]
        with_means = dict(logs)
        for name, values in kept.items():
            with_means[prefix + name] = sum(values) / len(values)
        kept.clear()
        log(with_means, *args, **kwargs)

    return logged
