"""How jobs start: the launcher of a node, and the entries that its ranks run. No torch."""
