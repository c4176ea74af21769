"""Mistakes that are read in the jaxpr of a function, before XLA: collectives by hand, dtypes, constants, callbacks."""
