"""`meshwright.fit`: train with any JAX step, in the same kind of run directory as `meshwright train`.

Read `library` first. `step` shards the step by its plan and checks its state (`keys`: its random keys), `batches`
shards the batches, `loop` runs the steps, and `config` is the content of `config.json`.
"""
