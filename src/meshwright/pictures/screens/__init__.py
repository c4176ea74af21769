"""Screens of commands as text: `inspection`, `verification` with the rows of `comparison`, `fix`, and `programs`."""
