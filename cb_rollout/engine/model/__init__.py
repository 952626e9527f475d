"""Run the model's own forward: probe its cache, check it on pages, lay out rows, call it.

The engine's executor calls the runner; probe and check run once, when an engine is created.
"""
