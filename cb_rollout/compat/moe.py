"""Replace the grouped product that transformers' experts call (5.17 to 5.23).

`experts_implementation="grouped_mm"`, transformers' default, calls torch's grouped product, which
multiplies sorted tokens by stacked weights. Torch (2.11 to 2.13) has a kernel for bfloat16 on
compute capability 9 and 10. Otherwise torch reads the end of each group on the host, so the step
waits for the device and cannot be captured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers.integrations import moe as _moe

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.patching import CountedPatch

# Computes `[S, K]` by `[E, K, N]`; the third tensor says where each group of rows ends.
GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

FAST_CAPABILITIES = (9, 10)

_NAME = "_grouped_mm"

_ROUTER_LOGITS = "output_router_logits"


def without_router_logits(model: Any) -> dict[str, Any]:
    """Return the argument that turns off the balancing loss that a model's config asks for.

    The loss would need a mask of the rows, and generation does not need the loss.
    """
    configs = (model.config.get_text_config(), model.config)
    if not any(getattr(config, _ROUTER_LOGITS, False) for config in configs):
        return {}
    if _ROUTER_LOGITS not in hf_compat.forward_argument_names(model):
        return {}
    return {_ROUTER_LOGITS: False}


def waits_for_groups(weight: torch.Tensor) -> bool:
    """Return whether torch's grouped product with this weight waits for the device."""
    if weight.device.type != "cuda":
        return False
    is_fast = torch.cuda.get_device_capability(weight.device)[0] in FAST_CAPABILITIES
    return weight.dtype != torch.bfloat16 or not is_fast


def replacing_grouped_product(product: GroupedProduct) -> AbstractContextManager[None]:
    """Make experts in this thread use `product` if torch's own kernel would wait.

    Any thread may call. A release of transformers without the function is left as it is.
    """
    return _PATCH.installed(product) if hasattr(_moe, _NAME) else nullcontext()


def _product(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    product = _PATCH.of_thread
    if product is None or not waits_for_groups(weight):
        return _PATCH.own(input, weight, offs)
    # Under autocast the input may be wider than the weight; transformers casts the input to the
    # weight's dtype. While a check computes in a higher precision, the cast returns that precision
    # instead; then the weight is cast too, because the kernel takes one dtype.
    rows = input.to(weight.dtype)
    return product(rows, weight.to(rows.dtype), offs)


_PATCH = CountedPatch(_moe, _NAME, _product)
