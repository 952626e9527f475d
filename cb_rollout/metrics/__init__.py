"""Names, counters and observers of everything that is measured, and where the figures go.

The engine writes counters; observers watch it; Prometheus, the live line and the run records read.
"""
