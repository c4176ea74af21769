"""The checks of an inspection, one per file."""
