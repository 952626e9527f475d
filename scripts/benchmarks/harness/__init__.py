"""Clocks and tables of the workloads: times and memory of turns, and records as text."""
