"""Helpers that at least three of the benchmarks share."""
