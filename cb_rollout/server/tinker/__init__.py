"""Serve Tinker's API on your own machine: LoRA training and sampling for its official client."""
