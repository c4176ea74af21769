"""Lessons on sharding with graded exercises: `meshwright learn` on the command line, `meshwright.learn` in a lesson.

`pages/` has the lessons, one MyST Markdown file each; `lesson` reads them and writes notebooks. `exercise` has the
kinds of exercise that need no devices, `program` the kind that compiles the reader's function, and `exercises/` the
exercises of each lesson. Read first: `exercises/products.py` and `pages/05-the-four-cases-of-a-product.md`. `run`
executes a finished lesson as a notebook would.
"""
