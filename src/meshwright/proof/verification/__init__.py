"""Compare a plan with the program compiled for it, and with a measured run."""
