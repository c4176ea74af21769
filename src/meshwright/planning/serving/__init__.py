"""Serving plans: search of the layouts and batches to serve a model with."""
