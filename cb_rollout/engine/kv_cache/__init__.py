"""Own the KV cache: blocks, prefixes, pages, recurrent states and their memory."""
