"""Reaches past transformers' public API for its attention functions, with the version and why.

Nothing here keeps state.
"""

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def swap_attention_lookup(lookup: Callable[..., Any]) -> Callable[..., Any]:
    """Have models look their attention up by `lookup`; returns what they used (5.17 to 5.23)."""
    found, AttentionInterface.get_interface = AttentionInterface.get_interface, lookup
    return found


def sdpa_attention() -> Callable[..., Any]:
    """What transformers calls for `sdpa` attention."""
    return ALL_ATTENTION_FUNCTIONS["sdpa"]
