"""Rows of a trainer's batch: their records, and how a row finds its own."""
