"""Compare a plan with the program that its compiler makes, and with a measured run."""
