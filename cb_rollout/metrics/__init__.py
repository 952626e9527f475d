"""Define, keep and export the metrics of rollouts and engines.

The engine writes counters and durations; Prometheus and the run records read.
"""
