"""Estimate the error of a plan's step time from published training runs with a similar model and system (`runs.py`)."""
