"""Logits of transformers' own models on weights that NumPy draws, as `tests/data/published_logits/*.json`.

Run where torch and transformers are installed (5.23 made the files), without JAX:
`PYTHONPATH=src:tests/families python tests/families/make_published_logits.py`
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from published_weights import published

from meshwright.families import model_from_hugging_face

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
WINDOWED = SIZES | {"num_hidden_layers": 5, "sliding_window": 6, "query_pre_attn_scalar": 20}
LOCAL, FULL = "sliding_attention", "full_attention"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

CONFIGS = {
    "llama": SIZES | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1000.0, **LLAMA3}},
    "mistral": SIZES | {"sliding_window": 6},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SIZES | {"head_dim": 8},
    "qwen3": SIZES,
    "gemma": SIZES,
    "gemma2": WINDOWED | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": WINDOWED
    | {
        "layer_types": [LOCAL, LOCAL, FULL, LOCAL, LOCAL],
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        },
    },
    "gpt2": {"vocab_size": 48, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt_neox": {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    | {"num_attention_heads": 2},
}
"""What each family is made with beyond its defaults."""

FOLDER = Path(__file__).parents[1] / "data" / "published_logits"


def main() -> None:
    """Write a file for each family: the whole config.json, the tokens, and the logits of every third position."""
    tokens = np.random.default_rng(0).integers(0, 48, (2, 24))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for kind, changes in CONFIGS.items():
        config = transformers.AutoConfig.for_model(kind, **changes)
        written = config.to_dict()
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        tensors = published(model_from_hugging_face(written, name=kind))
        load(model, {name: torch.tensor(array) for name, array in tensors.items()})
        with torch.no_grad():
            logits = model(torch.tensor(tokens)).logits[:, ::3]
        data = {
            "config": written,
            "tokens": tokens.tolist(),
            "logits": [[[float(f"{x:.7g}") for x in row] for row in rows] for rows in logits.tolist()],
        }
        (FOLDER / f"{kind}.json").write_text(json.dumps(data) + "\n")
        print(kind, float(logits.std()))


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors in place, all of them; tied heads and buffers are what a model has beyond them."""
    if hasattr(model.config, "num_local_experts"):
        # transformers 5 keeps the experts of a layer in two arrays, and reads published checkpoints into them.
        model.load_state_dict(stacked(tensors, model.config.num_local_experts), strict=False)
        return
    # transformers 5 renames the head of GPT-NeoX as it reads it.
    tensors = {name.replace("embed_out", "lm_head"): tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing


def stacked(tensors: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Mixtral's experts as transformers 5 has them: gate and up in one, [experts, 2 f, d]."""
    found = {name.replace("block_sparse_moe", "mlp"): x for name, x in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        own = [{w: tensors[f"{layer}.experts.{e}.{w}.weight"] for w in ("w1", "w2", "w3")} for e in range(count)]
        path = layer.replace("block_sparse_moe", "mlp")
        found[f"{path}.experts.gate_up_proj"] = torch.stack([torch.cat([e["w1"], e["w3"]]) for e in own])
        found[f"{path}.experts.down_proj"] = torch.stack([e["w2"] for e in own])
    return found


if __name__ == "__main__":
    main()
