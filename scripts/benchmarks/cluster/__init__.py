"""Rollouts on several engines: the workloads `pool` and `simulate`, and the simulator.

`pool` times a pool of workers beside an engine. `simulation` predicts the steps of a training run
from lengths, speeds, syncs and failures. `simulate` holds it against runs, and simulates
`scenarios`.
"""
