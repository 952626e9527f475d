"""Write a report of a run's records, or a comparison of two runs, as a self-contained page."""

from cb_rollout.tools.report.page import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
