"""This process among its peers: its world, its end, its failure."""
