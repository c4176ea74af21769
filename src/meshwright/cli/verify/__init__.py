"""`meshwright verify`: `command` runs it for a train step; `serving` for a server's."""
