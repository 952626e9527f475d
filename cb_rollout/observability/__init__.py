"""What an engine is doing, for people and for collectors: names, figures, Prometheus' text."""
