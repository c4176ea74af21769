"""The HTTP of a server: OpenAI's endpoints, those of EasyLM and LWM, metrics and a chat page, over any `Serves`."""
