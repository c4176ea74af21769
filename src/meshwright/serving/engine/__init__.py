"""Requests in, tokens out: continuous batching over a paged KV cache.

Each request (`request`) has sequences (`sequence`). `scheduler` gives them rows and pages (`pages`, `prefix`), shared
between API keys (`shares`), and says which tokens the next step reads. `engine`, the thread that does it, writes that
as one array of numbers (`programs`), and `runner` calls the compiled program of that shape. A step that is running is
read one round later, so that the device never waits for Python.

Programs with the widest page tables are compiled before the first request, the others while requests are answered.
`draft_programs` are those of a draft model (speculative decoding). An exception ends the request that caused it, and a
failed device program ends the engine (`faults`). `followers` are the other processes of its mesh. `constraints` and
`grammars` restrict texts to a schema. `lowered` makes the same programs for abstract weights and pages, which
`verification` compiles beside a serving plan.
"""
