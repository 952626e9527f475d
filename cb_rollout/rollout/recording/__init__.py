"""Record rollouts for the report and wandb; under `attach` and in your own loop."""
