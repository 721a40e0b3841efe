"""The pure planner: costs in, plans out. No torch."""
