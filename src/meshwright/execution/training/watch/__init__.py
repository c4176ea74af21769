"""Monitoring of a run: metric rows and curves, goodput, profiles, comparison with the plan."""
