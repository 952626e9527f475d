"""Decode steps that read the pages where they lie, and how a model's own forward uses them."""
