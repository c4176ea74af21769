"""Small tokenizers, and the tokens of transformers with each tokenizer_config.json: `tests/references/tokenizers/`.

`spaces.json` prepares text as Llama 2's file does, `bytes.json` as GPT-2's. `cases.json` has the configs, and the
tokens of each text with what they are decoded as. Run where transformers 5.23 is installed: `make references`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "tokenizers"
CORPUS = ("the quick brown fox jumps over the lazy dog", "def main():\n    return 0\n", "naïve café — 東京 🙂 word")
TEXTS = (
    *("hello world", "", " ", "  two  spaces ", "a\nb\tc", "naïve café ﬁt", "日本語 🙂", "def f(x):\n    return x"),
    *("ends with space ", "\n\n\t x\r\n", "▁", "▁▁a▁", "a▁ b", "<s>", "</s>x", "<s> hi</s> there", " <s>", "a<s>b"),
    *("</s></s>  </s> x", "a<extra>b <extra> c", "<|im_start|>user\nhi<|im_end|>", "<pad>x <pad>", "aword b word"),
    *(
        "x <ls> y <rs> z",
        "e\u0301te\u0301",
        "👩‍💻",
        "ｆｕｌｌ",
        "\x00\x01\x7f",
        "한국어",
        "1234.5 % of all",
        "[INST] hi [/INST]",
    ),
    *("https://a.b/c?d=e", "\u3000a\u00a0", "it's", "ABC abc", "{}[]<>"),
)
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def added(first: int) -> dict[str, Any]:
    """Tokens with every flag, by their numbers."""
    tokens: dict[str, dict[str, bool]] = {
        "<extra>": {"special": True},
        "<|im_start|>": {"special": True, "normalized": False},
        "<|im_end|>": {"special": True, "normalized": False},
        "<ls>": {"lstrip": True, "normalized": False},
        "<rs>": {"rstrip": True, "normalized": True},
        "word": {"single_word": True, "normalized": False},
    }
    plain = dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False)
    return {str(first + n): {"content": text, **plain, **flags} for n, (text, flags) in enumerate(tokens.items())}


def main() -> None:
    """Write the tokenizers and the cases."""
    FOLDER.mkdir(exist_ok=True)
    sizes = {name: make().get_vocab_size() for name, make in (("spaces", spaces), ("bytes", of_bytes))}
    llama = {"tokenizer_class": "LlamaTokenizerFast", **NAMED}
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    cases = {
        "spaces": {
            "llama": llama,
            "llama legacy": llama | {"legacy": True},
            "llama not legacy": llama | {"legacy": False},
            "llama no prefix": llama | {"legacy": False, "add_prefix_space": False},
            "llama added": llama | {"legacy": False, "added_tokens_decoder": added(sizes["spaces"])},
            "no class": NAMED,
            "as mistral": llama | {"legacy": False},
        },
        "bytes": {
            "added": fast | {"added_tokens_decoder": added(sizes["bytes"])},
            "llama of bytes": llama | {"added_tokens_decoder": added(sizes["bytes"])},
            "flags": fast | {"added_tokens_decoder": {"0": {"content": "<s>", "special": True, "rstrip": True}}},
            "pad": fast | {"pad_token": "<pad>", "additional_special_tokens": ["<extra>"]},
            "listed": fast | {"extra_special_tokens": ["<extra>"]},
            "by role": fast | {"extra_special_tokens": {"image_token": "<extra>"}},
        },
    }
    found = []
    for file, configs in cases.items():
        for name, config in configs.items():
            model_type = "mistral" if name == "as mistral" else "llama"
            found.append(case(name, file, config, {"model_type": model_type}))
    (FOLDER / "cases.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def case(name: str, file: str, tokenizer_config: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What AutoTokenizer makes of the texts in a directory of these files."""
    with tempfile.TemporaryDirectory() as folder:
        files = {"tokenizer_config.json": json.dumps(tokenizer_config), "config.json": json.dumps(config)}
        for path, text in (files | {"tokenizer.json": (FOLDER / f"{file}.json").read_text()}).items():
            (Path(folder) / path).write_text(text)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        rows.append({"text": text, "tokens": tokens, "decoded": tokenizer.decode(tokens, skip_special_tokens=True)})
    return {"name": name, "file": file, "tokenizer_config": tokenizer_config, "config": config, "texts": rows}


def spaces() -> Tokenizer:
    """A BPE with bytes for what is in no piece, whose spaces are prepared by a normalizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    joined = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(joined)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False, limit_alphabet=40
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return saved(tokenizer, "spaces", 3)


def of_bytes() -> Tokenizer:
    """A byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return saved(tokenizer, "bytes", 2)


def saved(tokenizer: Tokenizer, name: str, num_special: int) -> Tokenizer:
    """The tokenizer as its file has it: the first tokens are special, bytes are plain pieces."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:num_special]
    (FOLDER / f"{name}.json").write_text(json.dumps(data, ensure_ascii=False) + "\n")
    return Tokenizer.from_file(str(FOLDER / f"{name}.json"))


if __name__ == "__main__":
    main()
