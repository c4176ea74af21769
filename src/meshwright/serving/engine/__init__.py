"""Requests in, tokens out: continuous batching over a paged KV cache.

A request (`request`) has one sequence (`sequence`) per completion. `scheduler` assigns batch rows and cache pages
(`pages`, `prefix`) to sequences, divides the rows fairly between API keys (`shares`), and chooses the tokens that the
next step processes. `engine`, a thread, packs the input of the step into arrays (`step_arrays`), and `runner` calls the
compiled program (`programs`) for the step's shape. The engine reads the results of a step after it has dispatched the
next one, so that the devices never wait for Python.

Programs with the widest page tables are compiled before the first request, the others while requests are answered.
`draft_programs` has the programs of a draft model (speculative decoding). An exception ends the request that caused it;
a failed device program ends the engine (`faults`). `followers` runs the other processes of the engine's mesh.
`constraints` and `grammars` restrict generated text to a grammar. `lowered` lowers the same programs for abstract
weights and pages; `proof.verification.serving` compiles them to compare with a serving plan.
"""
