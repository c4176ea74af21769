"""OpenAI's endpoints, with vLLM's additional fields: completions, chat completions, responses, embeddings, tokenize."""
