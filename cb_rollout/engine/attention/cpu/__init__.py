"""Run decode steps on a CPU: C++ attention over the pages, inside a traced forward."""
