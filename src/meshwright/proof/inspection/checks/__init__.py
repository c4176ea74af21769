"""The checks of an inspection, one file a check."""
