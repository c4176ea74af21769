"""Targets are split over the vocabulary as logits are, and whole along the batch, which dp splits."""

import jax
from planted import array

KIND, FINDS, MESH = "waste", "whole-beside-batch", {"dp": 4, "tp": 2}


def program(mesh, axis):
    def loss(head, x, targets):
        return -(jax.nn.log_softmax(x @ head) * targets).sum(-1).mean()

    targets = array(mesh, (32, 256, 512), axis, None, "tp")
    return jax.jit(loss), (array(mesh, (64, 512), None, "tp"), array(mesh, (32, 256, 64), "dp"), targets)


def mistake(mesh):
    return program(mesh, None)


def clean(mesh):
    return program(mesh, "dp")
