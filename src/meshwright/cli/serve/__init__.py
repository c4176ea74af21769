"""`meshwright serve`: `command` runs one server, `replicas` several behind a front, `plan` reads a serving plan."""
