"""The sharding algebra: parse sharded einsums, check them, derive the collectives they need. Imports no JAX."""
