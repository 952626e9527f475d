"""Measurements: each file prints the figures of one page of `docs/`, or writes their record.

`agreement`, `audit`, `forks`, `learning` and `tree` write a record into `docs/benchmarks/`. The
others print, and the page has what they printed. Workloads that race contenders are in
`benchmarks/`.
"""
