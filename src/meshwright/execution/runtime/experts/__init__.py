"""MoE experts: routing, dispatch of tokens to the devices of their experts, grouped matmuls, combination of results."""
