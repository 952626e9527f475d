"""Rows of a trainer's batch: their records, and how each row's record is found."""
