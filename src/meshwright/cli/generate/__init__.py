"""`meshwright generate`: `command` for typed prompts, `data` for a file of them."""
