"""Preference tuning: losses of pairs of answers, and the frozen reference that they are held against."""
