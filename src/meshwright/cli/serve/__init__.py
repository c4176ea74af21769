"""`meshwright serve`: `command` runs one server, `replicas` a front before several, `plan` reads a serving plan."""
