"""Connect other libraries: TRL, wandb, OpenTelemetry and xgrammar, each in its own room."""
