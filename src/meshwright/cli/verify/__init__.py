"""`meshwright verify`: `command` verifies a train step, `serving` a server's step."""
