"""AutoPipe: measures unit costs and chooses the cheapest plan."""
