"""Load a model and a tokenizer from a checkpoint directory or a name on the hub.

Owns the checks of a checkpoint, with an error for each fault. Called by the command-line tools.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
)

from cb_rollout.compat.multimodal import is_processor, reads_images, text_tokenizer
from cb_rollout.compat.tensor_parallel import distributed_config
from cb_rollout.errors import ConfigurationError, RolloutError, abbreviated, error_text

# "auto" is the dtype that the checkpoint was saved in.
DTYPES = ("auto", "float32", "bfloat16", "float16")

# transformers loads a masked model's checkpoint as a causal model without a warning.
MASKED_SUFFIX = "ForMaskedLM"

_LOGGER = logging.getLogger(__name__)


def require_dtype(dtype: str) -> None:
    """Raise `ConfigurationError` for a dtype that is not in `DTYPES`."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")


def load_model(
    name: str, dtype: str = "auto", device: str = "auto", *, tensor_parallel_size: int = 1
) -> PreTrainedModel:
    """Load a checkpoint's causal language model, with any vision tower, in evaluation mode.

    `name` is a local directory or a name on the hub, `dtype` one of `DTYPES`. A
    `tensor_parallel_size` above 1 splits the layers over that many processes, which must all call
    this. Raises `ConfigurationError` if the device or checkpoint does not exist, or if the model
    cannot be read or split, lacks weights, is not causal, or does not fit into memory.
    """
    require_dtype(dtype)
    target = torch_device(device)
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    advice = "pass the directory that save_pretrained wrote, with config.json and all its weights"
    with _loading("causal language model", name, advice):
        config = AutoConfig.from_pretrained(name)
        if tensor_parallel_size > 1:
            options["distributed_config"] = distributed_config(config, tensor_parallel_size)
        loaded: Any = _model_class(config).from_pretrained(name, **options)
    model, report = loaded
    if any(made.endswith(MASKED_SUFFIX) for made in model.config.architectures or ()):
        raise ConfigurationError(
            f"{name!r} is a {model.config.architectures[0]}, which attends in both directions; "
            "pass a causal language model."
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigurationError(
            f"{name!r} lacks {len(missing)} of the model's weights, which would be initialized at "
            f"random: {abbreviated(missing)}; save the checkpoint from a {type(model).__name__}."
        )
    try:
        return model.eval().to(target)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{name!r} does not fit on {target} ({error_text(error)}); free memory, or set "
            "dtype='bfloat16' or device='cpu'."
        ) from error


def _model_class(config: Any) -> Any:
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def shape_of_model(name: str) -> tuple[PreTrainedModel, torch.dtype]:
    """Create a model from a checkpoint's config, in bfloat16; call it inside `without_values`.

    Returns the model, and the dtype of the checkpoint. Raises `ConfigurationError` if there is no
    config of a causal language model.
    """
    with _loading("causal language model", name, "pass the directory of its config.json"):
        config = AutoConfig.from_pretrained(name)
        # Creating the model writes its dtype into the config.
        saved_dtype: Any = config.dtype or torch.float32
        model: Any = _model_class(config).from_config(config, dtype=torch.bfloat16)
    return model.eval(), saved_dtype


def load_tokenizer(name: str) -> Any:
    """Load a checkpoint's tokenizer, or raise `ConfigurationError`.

    For a model that reads images, load the processor. If that fails, log the reason and support
    text only.
    """
    try:
        reads = reads_images(AutoConfig.from_pretrained(name))
    except Exception:  # noqa: BLE001  a tokenizer may be alone; its own error says more
        reads = False
    if reads:
        try:
            return load_processor(name)
        except ConfigurationError as error:
            _LOGGER.warning("%s Prompts with images are refused.", error)
    advice = "correct the name, or save one there with tokenizer.save_pretrained"
    with _loading("tokenizer", name, advice):
        tokenizer = AutoTokenizer.from_pretrained(name)
    _require_vocabulary(name, tokenizer)
    return tokenizer


def load_processor(name: str) -> Any:
    """Load a checkpoint's image processor, or raise `ConfigurationError`."""
    advice = "save one there with processor.save_pretrained, or install what it needs"
    with _loading("processor of images", name, advice):
        processor = AutoProcessor.from_pretrained(name)
    if not is_processor(processor):
        raise ConfigurationError(
            f"{name!r} holds no image processor; save one there with processor.save_pretrained."
        )
    _require_vocabulary(name, text_tokenizer(processor))
    return processor


def _require_vocabulary(name: str, tokenizer: Any) -> None:
    # If its files are missing, transformers 5.23 returns a tokenizer of special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigurationError(
            f"{name!r} holds no tokenizer vocabulary; save one there with "
            "tokenizer.save_pretrained."
        )


def torch_device(device: str) -> torch.device:
    """Return a usable device, or raise `ConfigurationError`; "auto": prefer a GPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"device={device!r} cannot be used ({error_text(error)}); try cpu, or leave it at auto."
        ) from error
    return target


@contextmanager
def _loading(noun: str, name: str, advice: str) -> Iterator[None]:
    _require_directory(name)
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        where = "" if Path(name).exists() else ", which is not a local directory"
        raise ConfigurationError(
            f"no {noun} could be loaded from {name!r}{where} ({error_text(error)}); {advice}."
        ) from error


def _require_directory(name: str) -> None:
    path = Path(name)
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigurationError(f"{name!r} cannot be read ({error.strerror}).") from error
    # A path is never looked up on the hub, whose error would be about the network.
    is_path = exists or path.is_absolute() or name.startswith(".") or name.count(os.sep) > 1
    if is_path and not path.is_dir():
        state = "is a file" if exists else "does not exist"
        raise ConfigurationError(f"{name!r} {state}; pass a checkpoint's directory.")
    if is_path and not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{name!r} has no config.json; pass the directory that save_pretrained wrote."
        )
