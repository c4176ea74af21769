"""A load generator for servers with OpenAI's completions API, and its latency and throughput figures."""
