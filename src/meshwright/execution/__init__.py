"""Run a plan with JAX: processes and devices, text and data, weights, models, training.

Start reading at `training.step`, the compiled training step, and `models.decoder`, the forward pass it differentiates.
Both use `runtime`: meshes, shardings, attention kernels, experts over ep, pipelines over pp. `models` also generates
text; `loading` opens a Hugging Face directory or a training run. No package before this one imports JAX.
"""
