"""Rows of a trainer's batch: their records, how a row finds its own, and the order they come in."""
