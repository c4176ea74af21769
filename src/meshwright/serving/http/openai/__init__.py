"""OpenAI's endpoints, with vLLM's further request fields: completions, chat completions, embeddings."""
