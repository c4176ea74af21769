"""Serving plans: layouts and batches to serve a model with, searched, explained and put into words."""
