"""Measure memory and plan it: what a device has, what training takes, what the KV cache gets."""
