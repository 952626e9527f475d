"""The engine: requests in, sampled tokens out, one step at a time.

Knows nothing of threads, trainers or frameworks above the model. Everything in this package is
called from one thread at a time, the one that steps the engine.
"""
