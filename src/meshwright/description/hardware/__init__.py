"""Chips and fabrics as data, and the links that each mesh axis runs over."""
