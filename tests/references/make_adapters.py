"""Adapters that PEFT makes of the goldens, with the logits of the adapted models: `tests/references/adapters/NAME/`.

Names as arguments make those alone. Each folder is what `save_pretrained` of PEFT writes (`adapter_config.json`,
`adapter_model.safetensors`) and `golden.npz`: `tokens` [rows, tokens] and the float32 `logits` [rows, tokens, vocab] of
the golden with the adapter; of an adapter with magnitudes (DoRA) also what PEFT merges, by the names of the weights.
The golden is the part of NAME before a `-`. Both factors are drawn so large that every one of them changes the logits.

    python tests/references/make_adapters.py

Run where torch 2.13.0, transformers 5.23 and peft are installed: `make references`.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model

GOLDENS = Path(__file__).parent
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
    "qwen3": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "gemma2": {"r": 3, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    "gpt2": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "mixtral": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "phi3": {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj", "down_proj"]},
    "mistral": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": r".*layers\.\d+\.(self_attn\.[qv]_proj|mlp\.down_proj)",
        "rank_pattern": {"v_proj": 4, r"layers\.1\.self_attn\.q_proj": 1},
        "alpha_pattern": {"down_proj": 3},
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "llama-ends": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    # Of tied embeddings the lookup alone, and both with one adapter.
    "gemma2-ends": {"r": 2, "lora_alpha": 2, "target_modules": r".*(embed_tokens|v_proj)"},
    "gpt2-ends": {"r": 2, "lora_alpha": 4, "target_modules": ["wte", "lm_head"]},
    "gemma-ends": {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "llama-dora": {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "use_dora": True},
    "phi3-dora": {"r": 2, "lora_alpha": 4, "target_modules": ["qkv_proj", "down_proj"], "use_dora": True},
    "gpt2-dora": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["c_attn", "c_proj"],
        "fan_in_fan_out": True,
        "use_dora": True,
    },
    "qwen3-excluded": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "exclude_modules": r".*layers\.1\..*v_proj|.*mlp.*",
        "use_rslora": True,
    },
}


def main() -> None:
    """Make each of them anew."""
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    for name, options in ((name, OPTIONS[name]) for name in sys.argv[1:] or OPTIONS):
        golden = name.partition("-")[0]
        base = transformers.AutoModelForCausalLM.from_pretrained(GOLDENS / golden, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **options))
        generator = torch.Generator().manual_seed(0)
        for path, parameter in model.named_parameters():
            if "lora_magnitude" in path:
                parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
            elif "lora_" in path or "modules_to_save" in path:
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        tokens = np.load(GOLDENS / golden / "golden.npz")["tokens"][:1, :8]
        with torch.no_grad():
            logits = model.eval()(torch.tensor(tokens)).logits.numpy()
        folder = GOLDENS / "adapters" / name
        shutil.rmtree(folder, ignore_errors=True)
        model.peft_config["default"].base_model_name_or_path = golden
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        merged = {}
        if options.get("use_dora"):
            modules = (path.rpartition(".lora_")[0] for path, _ in model.named_parameters() if ".lora_" in path)
            adapted = {module.removeprefix("base_model.model.") for module in modules}
            weights = model.merge_and_unload().named_parameters()
            merged = {path: array.detach().numpy() for path, array in weights if path.rpartition(".")[0] in adapted}
        np.savez_compressed(folder / "golden.npz", tokens=tokens, logits=logits, **merged)
        print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
