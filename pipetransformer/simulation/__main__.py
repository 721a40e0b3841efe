"""Prints docs/simulation.md."""

from pipetransformer.simulation.schema import simulation_page

print(simulation_page(), end="")
