"""Weight updates of vLLM's protocol, from files or from a trainer's group.

Owns their state and their checks. Called by `server/` only; bodies are in `protocol`, routes in
`api_server`.
"""
