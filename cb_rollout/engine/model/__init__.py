"""Run the model's own forward: probe its cache, check it on pages, lay out rows, call it."""
