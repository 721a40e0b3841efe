"""The start of jobs: the launcher of a node, and the entries of its ranks. No torch."""
