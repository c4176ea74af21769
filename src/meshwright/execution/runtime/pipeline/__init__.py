"""Pipelines: the schedules that run stages."""
