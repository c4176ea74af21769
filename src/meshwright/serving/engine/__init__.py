"""Requests in, tokens out: continuous batching over a paged KV cache.

Each request (`request`) has sequences (`sequence`). `scheduler` gives them rows and pages (`pages`, `prefix`), shared
fairly between API keys (`shares`), and decides which tokens the next step processes. `engine`, a thread, writes the
step as one array of numbers (`programs`), and `runner` calls the compiled program of its shape. The results of a step
are read one step later, so that the devices never wait for Python.

Programs with the widest page tables are compiled before the first request, the others while requests are answered.
`draft_programs` has the programs of a draft model (speculative decoding). An exception ends the request that caused it;
a failed device program ends the engine (`faults`). `followers` runs the other processes of the engine's mesh.
`constraints` and `grammars` restrict texts to a grammar. `lowered` lowers the same programs for abstract weights and
pages; `verification` compiles them to compare with a serving plan.
"""
