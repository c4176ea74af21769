"""Small SentencePiece models, and how the library that made them splits texts: `tests/goldens/sentencepiece/`.

`bpe.model` prepares text as Llama's does (spaces kept, bytes for what is in no piece), `unigram.model` as T5's (spaces
squeezed, characters replaced). `texts.json` has the tokens of each text, and what they are decoded as.
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
)


def main() -> None:
    """Train both models and keep what they make of the texts."""
    FOLDER.mkdir(exist_ok=True)
    rules = FOLDER / "rules.tsv"
    rules.write_text("FB01\t66 69\nE9\t65\n")
    made = {
        "bpe": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True},
        "unigram": {"normalization_rule_tsv": str(rules)},
    }
    found = {}
    for kind, options in made.items():
        sentencepiece.SentencePieceTrainer.train(
            input=",".join(map(str, DOCUMENTS)), model_prefix=str(FOLDER / kind), model_type=kind, vocab_size=700,
            character_coverage=0.995, minloglevel=2, **options,
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
