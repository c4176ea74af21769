"""Preference tuning: losses of pairs of a chosen and a rejected answer, and the frozen reference model."""
