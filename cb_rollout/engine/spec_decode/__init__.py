"""Propose draft tokens from n-grams and verify them in one forward."""
