"""The functions of torchvision that transformers' image processors call, written with torch.

Some types have image processors for torchvision only, which the tests do not install. Both sides of
a comparison read the same pixels, so these functions need not round as torchvision's do.
"""

import enum
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from PIL.Image import Resampling
from transformers import image_processing_backends as backends
from transformers.utils import is_torchvision_available

PARENTS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
    antialias: bool = True,
) -> torch.Tensor:
    """Resize (..., height, width) to `size`, by cubic interpolation unless it is bilinear."""
    is_bilinear = interpolation is InterpolationMode.BILINEAR
    mode = "bilinear" if is_bilinear else "bicubic"
    flat = image.float().reshape(-1, *image.shape[-3:])
    resized = F.interpolate(flat, tuple(size), mode=mode, antialias=antialias)
    if not image.is_floating_point():
        resized = resized.round().clamp(0, 255)
    return resized.to(image.dtype).reshape(*image.shape[:-2], *size)


def pad(
    image: torch.Tensor,
    padding: Sequence[int],
    fill: float | Sequence[float] | None = 0,
    padding_mode: str = "constant",
) -> torch.Tensor:
    """Pad the borders (left, top, right, bottom)."""
    assert padding_mode == "constant"
    left, top, right, bottom = padding
    height, width = image.shape[-2:]
    padded = torch.as_tensor(fill or 0, dtype=image.dtype).reshape(-1, 1, 1)
    shape = (*image.shape[:-2], height + top + bottom, width + left + right)
    padded = padded.expand(shape).clone()
    padded[..., top : top + height, left : left + width] = image
    return padded


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    mean = torch.as_tensor(mean, dtype=image.dtype).reshape(-1, 1, 1)
    std = torch.as_tensor(std, dtype=image.dtype).reshape(-1, 1, 1)
    return (image - mean) / std


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image


def pil_to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def import_with_torchvision(name: str) -> ModuleType:
    """Import a module of transformers that imports torchvision, where there is none."""
    if is_torchvision_available():
        return importlib.import_module(name)
    this = sys.modules[__name__]
    functional = "torchvision.transforms.v2.functional"
    pretended = {parent: ModuleType(parent) for parent in PARENTS} | {functional: this}
    pretended["torchvision.transforms.v2"].functional = this
    pretended["torchvision"].transforms = pretended["torchvision.transforms"]
    sys.modules.update(pretended)
    try:
        module = importlib.import_module(name)
    finally:
        for parent in pretended:
            del sys.modules[parent]
    modes = {
        Resampling[mode.name]: mode
        for mode in InterpolationMode
        if mode.name in Resampling.__members__
    }
    backends.tvF = this
    backends.pil_torch_interpolation_mapping = modes
    backends.torch_pil_interpolation_mapping = {mode: pil for pil, mode in modes.items()}
    return module
