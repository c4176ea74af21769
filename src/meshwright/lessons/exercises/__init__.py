"""The exercises, one module for each lesson, and `catalog`, which finds one by its name.

An answer is a formula, computed with the functions that plans are made of, and so is every wrong answer that has a
reply of its own.
"""
