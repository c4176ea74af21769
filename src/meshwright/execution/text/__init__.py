"""Text and tokens: tokenizers of Hugging Face directories, chat templates, and incremental decoding."""
