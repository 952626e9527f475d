"""Run requests through one model with continuous batching over a paged KV cache.

`service` is the only room that other packages call. One thread at a time steps the engine.
"""
