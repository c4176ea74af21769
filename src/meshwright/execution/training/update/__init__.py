"""The update of a train step: what becomes of gradients, by which optimizer, and which steps are left out."""
