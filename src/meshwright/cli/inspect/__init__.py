"""`meshwright inspect`: `command` runs it; `pictures.screens.inspection` prints the result."""
