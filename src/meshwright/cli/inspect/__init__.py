"""`meshwright inspect`: `command` runs it, `screen` prints the result."""
