"""Run what was planned with JAX: processes and devices, text and data, weights, models, training.

Begin with `training.step`, the compiled training step, and `models.decoder`, the forward pass it differentiates.
`runtime` has what both run on: meshes, shardings, attention kernels, experts over ep, pipelines over pp. `models` also
generates text, `loading` opens a directory of Hugging Face or of a run. JAX begins here.
"""
