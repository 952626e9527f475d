"""Own images of prompts: their encoding, what a forward takes of them, the check of a model."""
