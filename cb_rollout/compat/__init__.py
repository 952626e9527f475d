"""Reaches past public APIs, one file for each upstream, each with the versions it was read in.

Keeps no state and knows nothing of the package but its errors.
"""
