"""HLO text as data: instructions, loops, dataflow, collectives by mesh axis, flops. Imports no JAX."""
