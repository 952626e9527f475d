"""Generate completions of a whole data set, resumably.

Names load on first use, so that the command line reads the options without torch.
"""

from typing import TYPE_CHECKING

from cb_rollout.compat.lazy import lazy_names

if TYPE_CHECKING:
    from cb_rollout.tools.dataset.generate import DatasetReport as DatasetReport
    from cb_rollout.tools.dataset.generate import generate_dataset as generate_dataset
    from cb_rollout.tools.dataset.options import DatasetOptions as DatasetOptions

__all__, __getattr__, __dir__ = lazy_names(__name__)
