"""A checkpoint by its name: the model and the tokenizer that transformers makes of it.

Owns what can be wrong with a checkpoint, each reported in one error. Knows nothing of rollouts.
"""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from cb_rollout.errors import ConfigurationError, error_text

DTYPES = ("auto", "float32", "bfloat16", "float16")
# "auto" is what the checkpoint was saved in.


MASKED_SUFFIX = "ForMaskedLM"
# transformers makes a causal model of such a checkpoint too, without a word.


def load_model(name: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """The causal language model of a checkpoint, in evaluation mode.

    Args:
        name: a local directory, or a name on the hub.
        dtype: one of `DTYPES`.
        device: what torch calls a device; "auto": a GPU where there is one, else the CPU.

    Raises:
        ConfigurationError: there is no such checkpoint or device, it cannot be read, it is not a
            causal language model, or some of its weights are missing.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}.")
    target = torch_device(device)
    _refuse_what_is_no_directory(name)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, output_loading_info=True
        )
    except Exception as error:
        raise ConfigurationError(
            f"no causal language model could be loaded from {_described(name)} "
            f"({error_text(error)}); "
            "pass the directory that save_pretrained wrote, with config.json and all its weights."
        ) from error
    model, found = loaded
    if any(made.endswith(MASKED_SUFFIX) for made in model.config.architectures or ()):
        raise ConfigurationError(
            f"{name!r} is a {model.config.architectures[0]}, which reads both ways; pass a causal "
            "language model."
        )
    if missing := sorted(found["missing_keys"]):
        raise ConfigurationError(
            f"{name!r} lacks {len(missing)} of the model's weights, which would be random: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; save the checkpoint "
            f"from a {type(model).__name__}."
        )
    try:
        return model.eval().to(target)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{name!r} does not fit on {target} ({error_text(error)}); free memory, or set dtype "
            "or device."
        ) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a checkpoint.

    Raises:
        ConfigurationError: there is none that can be read.
    """
    _refuse_what_is_no_directory(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ConfigurationError(
            f"no tokenizer could be loaded from {_described(name)} ({error_text(error)}); mend the "
            "name, or save one there with tokenizer.save_pretrained."
        ) from error
    # Where its files are missing, transformers 5.23 makes one of its special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConfigurationError(
            f"{name!r} holds no tokenizer's vocabulary; save one there with "
            "tokenizer.save_pretrained."
        )
    return tokenizer


def torch_device(device: str) -> torch.device:
    """What `device` names, tried out; "auto": a GPU where there is one, else the CPU.

    Raises:
        ConfigurationError: it is not there.
    """
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


def _described(name: str) -> str:
    return repr(name) if Path(name).exists() else f"{name!r}, which is no directory here"


def _refuse_what_is_no_directory(name: str) -> None:
    """A path is never looked up on the hub, where its error would speak of networks."""
    path = Path(name)
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigurationError(f"{name!r} cannot be read ({error.strerror}).") from error
    is_path = exists or path.is_absolute() or name.startswith(".") or name.count(os.sep) > 1
    if is_path and not path.is_dir():
        state = "is a file" if exists else "does not exist"
        raise ConfigurationError(f"{name!r} {state}; pass a checkpoint's directory.")
    if is_path and not (path / "config.json").is_file():
        raise ConfigurationError(
            f"{name!r} has no config.json; pass the directory that save_pretrained wrote."
        )
