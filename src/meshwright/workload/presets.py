"""The models known by name, each from its paper or the config.json published with its weights."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.workload.config import Experts, LatentAttention, ModelConfig
from meshwright.workload.hugging_face import model_from_hugging_face
from meshwright.workload.images import RESNETS


def _decoder(
    name: str, layers: int, embed: int, mlp: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> ModelConfig:
    """A preset; heads are of 128 where nothing else is said."""
    return ModelConfig(
        name=name,
        num_layers=layers,
        embed=embed,
        mlp=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=more.pop("head_dim", 128),
        vocab=vocab,
        **more,
    )


_GPT: Mapping[str, Any] = {
    "tied_embeddings": True,
    "gated": False,
    "activation": "gelu",
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "positions": "learned",
}
"""What GPT-2 has in other ways than Llama."""

PRESETS: Mapping[str, ModelConfig] = {
    model.name: model
    for model in (
        # A byte-level model that learns in minutes on a laptop; 8 kv heads, so that tp may be 8.
        _decoder("tiny", 2, 128, 384, 8, 8, 256, head_dim=16),
        # The same in Mixtral's shape, 2 of 8 experts for a token; and with an mlp that every token passes beside them
        # and a dense first layer, as DeepSeek-V2 has.
        _decoder("tiny-moe", 2, 128, 384, 8, 8, 256, head_dim=16, experts=Experts(count=8, num_active=2, mlp=192)),
        _decoder(
            "tiny-moe-shared",
            2,
            128,
            384,
            8,
            8,
            256,
            head_dim=16,
            experts=Experts(count=8, num_active=2, mlp=96, shared_mlp=192, num_dense_layers=1),
        ),
        # Llama 2: arXiv:2307.09288 and the config.json published with the weights.
        _decoder("llama2-7b", 32, 4096, 11008, 32, 32, 32_000),
        _decoder("llama2-13b", 40, 5120, 13824, 40, 40, 32_000),
        _decoder("llama2-70b", 80, 8192, 28672, 64, 8, 32_000),
        # Llama 3: arXiv:2407.21783, table 3, and the config.json published with the weights.
        _decoder("llama3-8b", 32, 4096, 14336, 32, 8, 128_256, rope_theta=500_000.0),
        _decoder("llama3-70b", 80, 8192, 28672, 64, 8, 128_256, rope_theta=500_000.0),
        _decoder("llama3-405b", 126, 16384, 53248, 128, 8, 128_256, rope_theta=500_000.0),
        # GPT-2: the config.json of openai-community/gpt2 and gpt2-xl.
        _decoder("gpt2", 12, 768, 3072, 12, 12, 50_257, head_dim=64, max_positions=1024, **_GPT),
        _decoder("gpt2-xl", 48, 1600, 6400, 25, 25, 50_257, head_dim=64, max_positions=1024, **_GPT),
        # GPT-3: arXiv:2005.14165, table 2.1; GPT-2's vocabulary, padded so that tp can split it (arXiv:2104.04473).
        _decoder("gpt3-175b", 96, 12288, 49152, 96, 96, 51_200, max_positions=2048, **_GPT),
        # GPT-NeoX-20B: arXiv:2204.06745, section 3, and the config.json of EleutherAI/gpt-neox-20b.
        _decoder(
            "gpt-neox-20b",
            44,
            6144,
            24576,
            64,
            64,
            50_432,
            head_dim=96,
            parallel_blocks=True,
            **(dict(_GPT) | {"positions": "rotary", "tied_embeddings": False}),
        ),
        # PaLM: arXiv:2204.02311, table 1 and section 2: multi-query, SwiGLU, parallel blocks, tied, no biases.
        _decoder(
            "palm-540b",
            118,
            18432,
            73728,
            48,
            1,
            256_000,
            head_dim=256,
            tied_embeddings=True,
            norm="layer",
            parallel_blocks=True,
        ),
        # BLOOM: arXiv:2211.05100, table 3, and the config.json of bigscience/bloom.
        _decoder(
            "bloom-176b",
            70,
            14336,
            57344,
            112,
            112,
            250_880,
            embedding_norm=True,
            **(dict(_GPT) | {"positions": "alibi"}),
        ),
        # Mistral: arXiv:2310.06825, table 1.
        _decoder("mistral-7b", 32, 4096, 14336, 32, 8, 32_000, sliding_window=4096),
        # Mixtral: arXiv:2401.04088, table 1.
        _decoder(
            "mixtral-8x7b",
            32,
            4096,
            14336,
            32,
            8,
            32_000,
            rope_theta=1_000_000.0,
            experts=Experts(count=8, num_active=2, mlp=14336),
        ),
        # DeepSeek-V2: arXiv:2405.04434, section 3.1.2, and the config.json of deepseek-ai/DeepSeek-V2.
        _decoder(
            "deepseek-v2",
            60,
            5120,
            12288,
            128,
            128,
            102_400,
            experts=Experts(count=160, num_active=6, mlp=1536, shared_mlp=3072, num_dense_layers=1),
            latent=LatentAttention(
                query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
            ),
        ),
        # DeepSeek-V3: arXiv:2412.19437, section 4.2, without the module that predicts a second token.
        _decoder(
            "deepseek-v3",
            61,
            7168,
            18432,
            128,
            128,
            129_280,
            experts=Experts(count=256, num_active=8, mlp=2048, shared_mlp=2048, num_dense_layers=3),
            latent=LatentAttention(
                query_rank=1536, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
            ),
        ),
        # Qwen2: arXiv:2407.10671, table 1, and the config.json of Qwen/Qwen2-7B.
        _decoder("qwen2-7b", 28, 3584, 18944, 28, 4, 152_064, qkv_bias=True, rope_theta=1_000_000.0),
        # Qwen3: arXiv:2505.09388, table 1, and the config.json of Qwen/Qwen3-8B.
        _decoder("qwen3-8b", 36, 4096, 12288, 32, 8, 151_936, qk_norm=True, rope_theta=1_000_000.0),
        # Qwen3-30B-A3B: arXiv:2505.09388, table 2, and the config.json of Qwen/Qwen3-30B-A3B.
        _decoder(
            "qwen3-30b-a3b",
            48,
            2048,
            6144,
            32,
            4,
            151_936,
            qk_norm=True,
            rope_theta=1_000_000.0,
            experts=Experts(count=128, num_active=8, mlp=768),
        ),
        # Gemma: arXiv:2403.08295, table 1, and the config.json of google/gemma-7b.
        _decoder("gemma-7b", 28, 3072, 24576, 16, 16, 256_000, head_dim=256, tied_embeddings=True, activation="gelu"),
        # Gemma 2: arXiv:2408.00118, table 1, and the config.json of google/gemma-2-9b.
        _decoder(
            "gemma2-9b",
            42,
            3584,
            14336,
            16,
            8,
            256_000,
            head_dim=256,
            tied_embeddings=True,
            activation="gelu",
            post_norms=True,
        ),
    )
}


SEQ_LENS: Mapping[str, int] = {
    "llama2-7b": 4096,
    "llama2-13b": 4096,
    "llama2-70b": 4096,
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "llama3-405b": 8192,
    "palm-540b": 2048,
    "bloom-176b": 2048,
    "mixtral-8x7b": 8192,
    "deepseek-v3": 4096,
    "qwen3-8b": 4096,
    "gemma-7b": 8192,
}
"""The tokens of a sequence in pre-training, as the papers above say; of Mixtral, Mistral 7B's (arXiv:2310.06825)."""


def usual_seq_len(model: ModelConfig) -> int:
    """The tokens of a sequence where nobody says: what the model was trained on, all its learned positions, or 2048."""
    return SEQ_LENS.get(model.name) or (model.max_positions if model.positions == "learned" else 2048)


def load_model(name: str) -> ModelConfig:
    """The model of a preset's name, or of a path to a `config.json` (or to the folder that holds one)."""
    if name in PRESETS:
        return PRESETS[name]
    if name in RESNETS:
        raise MeshwrightError(
            f"{name} is a model of images, which `meshwright plan {name} …` plans and nothing runs yet"
        )
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _read_config(path)
    near = difflib.get_close_matches(name, [*PRESETS, *RESNETS], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise MeshwrightError(
        f"no model {name!r}; {hint}models are {', '.join(PRESETS)}, or the path of a Hugging Face config.json;"
        f" of images, to be planned, {', '.join(RESNETS)}"
    )


def _read_config(path: Path) -> ModelConfig:
    """The model of a file."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise MeshwrightError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise MeshwrightError(f"{path} holds a {type(data).__name__}; a config.json holds an object")
    return model_from_hugging_face(data, name=path.parent.name or path.stem)
