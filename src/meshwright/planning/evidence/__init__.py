"""Estimate the error of a prediction from published runs similar to a plan.

`runs.py` loads the stored runs and finds the similar ones.
"""
