"""Define, keep and export metrics: the engine writes, Prometheus and run records read."""
