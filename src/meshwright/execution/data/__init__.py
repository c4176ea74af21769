"""Convert files to documents of tokens: records, templates, chats, and token stores on disk. Imports no JAX."""
