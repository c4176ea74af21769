"""`meshwright inspect`: `command` runs it; `pictures.inspection` prints the result."""
