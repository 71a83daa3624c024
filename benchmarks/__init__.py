"""Measurements on a GPU; each writes benchmarks/results/NAME.json."""
