"""Own the KV cache, for the engine's thread: blocks, prefixes, pages, states, their memory."""
