"""Explanations of a plan: one module per question, with the facts that answer it.

A fact is a small class that holds its numbers and prints itself as a sentence.

Begin with `step` (what limits the best plan), then `gap` (why another one loses).
"""
