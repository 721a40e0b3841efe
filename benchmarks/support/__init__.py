"""What the benchmarks share; the scripts themselves are one folder up."""
