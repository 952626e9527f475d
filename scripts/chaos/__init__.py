"""Harm done at random or on purpose, for longer than a test may take.

`pool` kills and stops the workers of a pool, `planted_faults` plants faults into the engine's
forwards, and `bitwise` plays random rollouts until a bit differs.
"""
