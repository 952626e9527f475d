"""Write a run's records as a page, two runs as a comparison, and a run's times as a trace."""

from cb_rollout.tools.report.page import write_comparison, write_report
from cb_rollout.tools.report.trace import write_trace

__all__ = ["write_comparison", "write_report", "write_trace"]
