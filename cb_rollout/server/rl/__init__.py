"""The endpoints of vLLM that reinforcement learning calls: tokens in and out, pauses, weights.

Owns their bodies, their answers and the state of a pause. Called by `server/` only, on the
server's asyncio thread; routes are in `api_server`.
"""
