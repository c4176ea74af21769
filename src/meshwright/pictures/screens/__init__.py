"""Screens of commands as text: `inspection`, `programs` (a plan of any function), and the rows of a `comparison`."""
