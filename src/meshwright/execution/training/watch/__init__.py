"""Monitoring of a run: metrics of each step, evaluation, goodput, profiles, comparison with the plan."""
