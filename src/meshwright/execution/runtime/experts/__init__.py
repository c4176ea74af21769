"""MoE experts: dispatch of tokens to the devices of their experts, grouped matmuls, and their combination."""
