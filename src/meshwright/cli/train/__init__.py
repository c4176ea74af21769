"""`meshwright train`: `command` runs it, with the options of `args` and `options` and the bar of `screen`."""
