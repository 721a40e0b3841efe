"""Models that are no chain: traced as graphs, cut, trained and analysed."""
