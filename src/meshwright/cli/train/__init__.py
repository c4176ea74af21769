"""`meshwright train`: `command` runs it, with the options of `args` and the progress bar of `screen`."""
