"""Why a plan is as it is: one module a question, with the facts that answer it.

A fact is a small class that holds its numbers and prints itself as a sentence.

Begin with `step` (what binds the best plan), then `gap` (why another one loses).
"""
