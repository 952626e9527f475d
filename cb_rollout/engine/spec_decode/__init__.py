"""Propose draft tokens from n-grams; the executor verifies them in one forward."""
