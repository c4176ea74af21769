"""Explanations of a plan: one module per question, with the facts that answer it.

A fact is a dataclass of numbers that prints itself as a sentence. Begin with `step` (what limits the best plan), then
read `gap` (why another plan is worse).
"""
