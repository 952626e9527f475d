"""The GPU path: its benchmark on a card, and what can be said of it without one.

`scripts/gpu_check.sh` runs `preflight`, which compiles the kernel of `doubling`, and `bench` on a
card. `host` times the host's part of a decode step, and `mutants` undoes each mend in turn to see
that its test fails; both run on any machine.
"""
