"""Plans, proves, runs and shows sharded computation in JAX."""
