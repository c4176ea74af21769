"""The HTTP server: OpenAI's endpoints, EasyLM's and LWM's, metrics and a chat page, for any `EngineClient`."""
