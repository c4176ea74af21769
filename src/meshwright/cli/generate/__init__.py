"""`meshwright generate`: `command` answers typed prompts, `data` a file of prompts."""
