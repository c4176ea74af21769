"""Rates that hardware achieves in matmuls, attention, collectives and memory, with the measurements behind them."""
