"""`meshwright.fit`: train with any JAX step, in a run directory like that of `meshwright train`.

Begin with `library`. `step` lays the step out by its plan and checks its state (`keys`: its random keys), `batches`
places the batches, `loop` takes the steps, and `config` is what `config.json` holds of such a run.
"""
