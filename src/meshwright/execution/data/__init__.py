"""Files as documents of tokens: records, templates, chats, and stores of tokens on the disk. Imports no JAX."""
