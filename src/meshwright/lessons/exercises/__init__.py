"""The exercises, one module for each lesson, and `catalog`, which finds one by its name.

Right answers, and the common wrong answers, are computed by the planner's functions.
"""
