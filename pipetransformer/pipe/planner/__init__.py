"""The pure planner: it chooses plans from costs. No torch."""
