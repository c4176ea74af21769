"""Chips and their networks as data, and the links that each mesh axis uses."""
