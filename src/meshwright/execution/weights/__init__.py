"""Published weights: safetensors of a Hugging Face directory into sharded parameters, and back."""
