"""Preference tuning: losses of pairs of answers, and the frozen reference model for comparison."""
