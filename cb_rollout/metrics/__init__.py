"""Define, keep and export metrics: the engine writes; Prometheus, wandb and run records read."""
