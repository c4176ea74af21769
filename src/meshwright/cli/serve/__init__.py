"""`meshwright serve`: `command` runs the server (`serving.server`), with the options of `args`."""
