"""What a partition of a graph is worth: theoretical and real times of its parts, balance, communication, memory."""
