"""The worth of a partition of a graph: theoretical and real times of its parts, balance, communication, memory."""
