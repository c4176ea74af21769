"""The checks that an inspection makes of a compiled program, one file a check."""
