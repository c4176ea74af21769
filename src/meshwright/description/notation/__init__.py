"""The sharding algebra: parse sharded products, check them, infer the collectives they need. Imports no JAX."""
