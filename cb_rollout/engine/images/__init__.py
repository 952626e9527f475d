"""Own images of prompts: their encoding, their tensors for a forward, and the check of a model."""
