"""What at least three of the benchmarks share."""
