"""Run decode steps on a CPU: C++ attention over the pages, and operators of a traced forward."""
