"""Time of a collective and of an op, on links and chips at their full rate."""
