"""`meshwright serve`: `command` runs it with the options of `args`.

`serving.server` is the server, `serving.front.replicas` starts several behind one proxy, and `serving.plan` reads a
serving plan.
"""
