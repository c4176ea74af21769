"""Lessons on sharding that check what their reader has understood: `meshwright learn`, and `meshwright.learn` in them.

`pages/` has the lessons, one MyST Markdown file each; `lesson` reads them and writes notebooks. `exercise` has the
kinds of exercise that need no devices, `program` the kind that compiles the reader's function, `exercises/` the
exercises of each lesson. Begin with `exercises/products.py` and `pages/05-the-four-cases-of-a-product.md`. `run`
executes a finished lesson as a notebook would.
"""
