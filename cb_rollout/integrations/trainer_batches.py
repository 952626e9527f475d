"""A trainer's scored batch, taken apart into groups and put together from groups.

Knows the names of TRL 1.16's tensors, and nothing of where they come from.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cb_rollout.errors import ConfigurationError

Batch = dict[str, Any]

LEFT_PADDED = ("prompt_ids", "prompt_mask")
# Every other tensor of a batch is padded on the right.


def groups_of(batch: Batch, size: int) -> list[Batch]:
    """A batch as one batch a group."""
    num_rows = len(batch["advantages"])
    unknown = [
        name
        for name, value in batch.items()
        if not (_is_scalar(value) or _has_rows(value, num_rows))
    ]
    if unknown:
        raise ConfigurationError(
            f"dynamic sampling cannot divide a batch that holds {', '.join(unknown)}; use Plain()."
        )
    return [
        {k: v if _is_scalar(v) else v[i : i + size] for k, v in batch.items()}
        for i in range(0, num_rows, size)
    ]


def merged(groups: Sequence[Batch], pad_token_id: int) -> Batch:
    """Groups as one batch, each tensor padded to the widest."""
    batch = {
        name: _stacked(name, [group[name] for group in groups], pad_token_id)
        for name, value in groups[0].items()
        if not _is_scalar(value)
    }
    mask = batch["completion_mask"] * batch.get("tool_mask", 1)
    return batch | {"num_items_in_batch": mask.sum()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _has_rows(value: Any, num_rows: int) -> bool:
    return isinstance(value, torch.Tensor | list) and len(value) == num_rows


def _stacked(name: str, values: list[Any], pad_token_id: int) -> Any:
    if isinstance(values[0], list):
        return [row for rows in values for row in rows]
    if values[0].dim() == 1:
        return torch.cat(values)
    width = max(tensor.shape[1] for tensor in values)
    fill = {"prompt_ids": pad_token_id, "completion_ids": pad_token_id, "tool_mask": 1}
    padded = []
    for tensor in values:
        missing = width - tensor.shape[1]
        sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
        padded.append(torch.nn.functional.pad(tensor, sides, value=fill.get(name, 0)))
    return torch.cat(padded)
