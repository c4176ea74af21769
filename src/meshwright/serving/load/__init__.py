"""Load on a server: requests at a rate or a concurrency over OpenAI's completions, and what their answers took."""
