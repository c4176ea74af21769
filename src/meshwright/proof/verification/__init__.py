"""Compare a plan with the program compiled for it, and with a measured run.

`library` is `meshwright.verify`. `plans` and `serving` compile the step of a plan, `comparison` makes the rows
predicted | compiled | measured, `explain` finds the causes of differences by exact identities of bytes, and
`differences` lists all causes and their printed phrases.
"""
