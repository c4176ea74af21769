"""What hardware achieves: products, attention, collectives and memory, with the data they were measured by."""
