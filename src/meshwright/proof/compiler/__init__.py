"""Compile programs for hardware that is not present, and read what the compiler made of them."""
