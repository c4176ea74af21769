"""The commands of `meshwright`: one module each, or a folder with a `command` module, listed in `main.COMMANDS`.

Begin with `main`, which imports a command's module, parses its arguments and runs it. A command has a dataclass `Args`
(in `args` where it is long), a function `run(args)` that returns the exit code, and `EXAMPLES` for its help. Options
that commands share are declared in `options`, options of one command in its `Args`. `words` parses the command line
into `Args`, `typed` rejects options without effect, `waiting` shows that a command is still busy. A command only reads
options and prints: the answers come from the library, and most of their screens and tables from `pictures`.
"""
