"""Small SentencePiece models, and how the library that made them splits texts: `tests/references/sentencepiece/`.

`bpe.model` prepares text as Llama's does (spaces kept, bytes for what is in no piece), `unigram.model` as T5's (spaces
squeezed, characters replaced), `plain.model` as the trainer does where nothing is said but "identity", `composed.model`
by Unicode's NFKC, `defined.model` as Gemma's with pieces of its user. `texts.json` has the tokens of each text, and
what they are decoded as.
"""

import json
from pathlib import Path

import sentencepiece

FOLDER = Path(__file__).parent / "sentencepiece"
DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
TEXTS = (
    *(
        "hello world",
        "",
        " ",
        "  two  spaces ",
        "a\nb\tc",
        "naïve café ﬁt",
        "日本語 🙂",
        "x" * 40,
        "def f(x):\n    return x",
    ),
    *("sharded parameters on a mesh", "ends with space ", "1234.5 % of all"),
    *(
        "\n\n\t x\r\n",
        "\n",
        "\t",
        "\r\n",
        "   ",
        "  \n  ",
        "\u3000a\u3000",
        "a\u00a0b\u00a0",
        "▁",
        "▁▁a▁",
        "a▁ b",
        "<0x41>a",
    ),
    *(
        "e\u0301te\u0301",
        "ｆｕｌｌ wｉ\u0301",
        "\u200d\u200b\ufeffx",
        "👩‍💻👨‍👩‍👧",
        "ﷺ ½ ²",
        "नमस्ते दुनिया",
        "한국어 \u1112\u1161\u11ab",
        "ｶﾞｷﾞ",
    ),
    *("a\u0300\u0301\u0302b", "\u0301x", "x<sym> <sym>", "\x00\x01\x7f", "https://a.b/c?d=e&f=%20", "é\r\né"),
)


def main() -> None:
    """Train both models and keep what they make of the texts."""
    FOLDER.mkdir(exist_ok=True)
    rules = FOLDER / "rules.tsv"
    rules.write_text("FB01\t66 69\nE9\t65\n")
    made = {
        "bpe": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True},
        "unigram": {"normalization_rule_tsv": str(rules)},
        "plain": {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True},
        "composed": {
            "model_type": "unigram",
            "normalization_rule_name": "nfkc",
            "byte_fallback": True,
            "character_coverage": 1.0,
        },
        "defined": {
            "model_type": "bpe",
            "normalization_rule_name": "identity",
            "byte_fallback": True,
            "remove_extra_whitespaces": False,
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<sym>", "\n\n", "▁▁", "▁▁▁"],
        },
    }
    found = {}
    for kind, options in made.items():
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(map(str, DOCUMENTS)), model_prefix=str(FOLDER / kind), vocab_size=700,
            minloglevel=2, **({"model_type": kind, "character_coverage": 0.995} | options),
        )  # fmt: skip
        (FOLDER / f"{kind}.vocab").unlink()
        model = sentencepiece.SentencePieceProcessor(str(FOLDER / f"{kind}.model"))
        found[kind] = [
            {"text": text, "tokens": (ids := model.encode(text)), "decoded": model.decode(ids)} for text in TEXTS
        ]
    rules.unlink()
    (FOLDER / "texts.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
