"""The data of a run: sources that are open, their rows, and the batch of any step."""
