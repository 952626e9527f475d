"""A run's records, or two runs' beside each other, as one page that needs nothing but a browser."""

from cb_rollout.tools.report.comparison import write_comparison
from cb_rollout.tools.report.page import write_report

__all__ = ["write_comparison", "write_report"]
