"""Runs on clusters that are not there."""
