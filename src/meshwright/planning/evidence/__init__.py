"""What a prediction is worth: published runs like a plan's, and how far their predictions were off.

`runs.py` reads the stored runs and finds those that are like a plan's.
"""
