"""The data of a run: opened sources, their rows, and the batch of any step."""
