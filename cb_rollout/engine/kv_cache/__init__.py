"""Own the KV cache: blocks, prefixes, pages, recurrent states and the memory under them.

The scheduler allocates blocks, and forwards read and write pages; both on the engine's thread.
"""
