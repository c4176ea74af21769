"""Requests in, tokens out: the scheduler decides, the runner takes steps, pages hold keys and values.

`engine` is the thread that serves requests; `scheduler` says what the next step reads, `programs` are the compiled
steps, `runner` calls them, `prefix` finds pages that earlier prompts filled.
"""
