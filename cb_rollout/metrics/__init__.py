"""Define, observe and export the metrics of rollouts and engines.

The engine writes counters; observers watch it; Prometheus and the run records read.
"""
