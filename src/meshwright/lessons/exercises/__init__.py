"""The exercises, one module for each lesson, and `catalog`, which finds one by its name.

Right answers, and the wrong answers that have a reply of their own, are computed by the planner's functions.
"""
