"""The output of commands as text: `verify`, `inspect`, `fix`, and `plan` of a function (`programs`)."""
