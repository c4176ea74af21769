"""`meshwright plan`: `command` runs it for training; `serving` and `images` are the other kinds of plans."""
