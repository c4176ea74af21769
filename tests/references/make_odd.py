"""Tiny models with settings that few have, as `make_references.py` makes its own: `tests/references/odd/NAME/`.

Windows in any layers, an odd number of rotated dims or of a value's, and models of text and images, of which the text
part is computed. Run where torch 2.13.0 and transformers 5.23 are installed: `make references`. Names as arguments make
those alone.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import make_references
import numpy as np
import torch
import transformers
from make_references import CONFIGS, FULL, LOCAL, computed, draw

FOLDER = Path(__file__).parent / "odd"
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}

ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text_mixed": ("gemma3_text", {"layer_types": [FULL, LOCAL, FULL, FULL, LOCAL]}),
    "qwen2_first_full": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "gpt_neox_odd_rotary": ("gpt_neox", {"hidden_size": 48, "rotary_pct": 0.25}),
    "deepseek_v3_odd_values": ("deepseek_v3", {"v_head_dim": 9}),
}
"""The golden that each is like, and what it has of its own."""


def wrappers() -> dict[str, torch.nn.Module]:
    """Models of text and images around the text of a golden."""
    gemma = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**CONFIGS["gemma3_text"]),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4,
    )
    mistral = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**(CONFIGS["mistral"] | {"sliding_window": None})),
        vision_config=transformers.PixtralVisionConfig(**(VISION | {"head_dim": 8})),
        tie_word_embeddings=False,
    )
    sizes = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    llama4 = transformers.Llama4Config(
        text_config=transformers.Llama4TextConfig(**CONFIGS["llama4_text"]),
        vision_config=transformers.Llama4VisionConfig(**(VISION | sizes | {"intermediate_size": 64})),
    )
    kinds = {
        "gemma3_wrapper": (gemma, transformers.Gemma3ForConditionalGeneration),
        "mistral3_wrapper": (mistral, transformers.Mistral3ForConditionalGeneration),
        "llama4_wrapper": (llama4, transformers.Llama4ForConditionalGeneration),
    }
    found = {}
    for name, (config, kind) in kinds.items():
        for part in (config, config.text_config):
            part.bos_token_id = part.eos_token_id = part.pad_token_id = None
        torch.manual_seed(0)
        found[name] = kind._from_config(config, attn_implementation="eager").eval().float()
    return found


def main() -> None:
    """Write a folder for each model."""
    make_references.FOLDER = FOLDER
    for name, (like, changes) in ODD.items():
        if name in (sys.argv[1:] or ODD):
            make_references.KINDS[name] = like
            make_references.make(name, CONFIGS[like] | changes)
    for name, model in wrappers().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            draw(model)
            model.generation_config.eos_token_id = None
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            model.save_pretrained(FOLDER / name)
            model.config.vocab_size = model.config.text_config.vocab_size
            np.savez_compressed(FOLDER / name / "golden.npz", **computed(model, gradients=False))


if __name__ == "__main__":
    main()
