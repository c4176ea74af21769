"""Weights in 8 and 4 bits, of training (`weights`) and of servers (`scaled`), and matmuls with them and in 8 bits."""
