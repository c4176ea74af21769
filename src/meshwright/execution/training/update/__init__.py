"""The update of a train step: from gradients to new parameters, by optimizer, and which steps are skipped."""
