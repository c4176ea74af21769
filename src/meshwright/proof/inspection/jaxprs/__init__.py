"""Find mistakes in the jaxpr of a function, before XLA: manual collectives, dtypes, constants, callbacks."""
