"""Training: the step, its data and state, and the loop that takes steps and records measurements."""
