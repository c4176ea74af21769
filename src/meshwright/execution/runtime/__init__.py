"""Run sharded computation: meshes, sharding contexts, attention kernels, experts, pipelines, sharded products."""
