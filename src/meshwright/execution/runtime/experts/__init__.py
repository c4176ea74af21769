"""Experts: tokens to the devices of their experts, products over their rows, and back."""
