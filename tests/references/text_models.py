"""Make known to `AutoModelForCausalLM` what transformers has as the text of models of images alone."""

import transformers
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

transformers.AutoModelForCausalLM.register(transformers.Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
