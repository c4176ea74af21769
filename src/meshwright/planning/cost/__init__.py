"""Sums over the ops of a step: flops, collectives, memory and seconds; `rates` has what hardware achieves."""
