"""Forward passes over a model's ops and its declared parameters."""
