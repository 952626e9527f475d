"""A run's records as one page that needs nothing but a browser."""

from cb_rollout.report.page import write_report

__all__ = ["write_report"]
