"""Score completions without padding, and compute each shared prefix once.

Owns the packed layout of a batch, the attention of packed tokens, and the forward of a model over
them, with gradients. Used by the loss under TRL, and by `cb_rollout.packed_logprobs`.
"""
