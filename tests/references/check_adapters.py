"""What PEFT says to the adapters that `write_adapters.py` made: one line each, kept in `adapters.txt`.

    python tests/references/check_adapters.py FOLDER

Each has to load without a warning onto its golden, and the logits have to be those that PEFT's own adapter gave. Run
where torch, transformers and peft are installed: `make references`.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from peft import PeftModel

GOLDENS = Path(__file__).parent


def main() -> int:
    """Print a line for each adapter; 1 where one is not as it should be."""
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}\n")
    print(f"{'adapter':<16}{'modules':>9}{'warnings':>10}{'logits off by':>15}")
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/adapter_config.json"))
    return int(sum([not check(folder) for folder in folders]) > 0)


def check(folder: Path) -> bool:
    """Load one and print what there is to say of it."""
    golden = np.load(GOLDENS / "adapters" / folder.name / "golden.npz")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        golden_of = GOLDENS / folder.name.partition("-")[0]
        base = transformers.AutoModelForCausalLM.from_pretrained(golden_of, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder).eval()
    # Of transformers' own names, and what PEFT says of its own adapters of tied embeddings too.
    known = ("deprecated", "tie_word_embeddings=True")
    said = [each for each in said if not any(word in str(each.message) for word in known)]
    modules = sum("lora_A" in name or "lora_embedding_A" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        logits = model(torch.tensor(golden["tokens"])).logits.numpy()
    off = float(np.abs(logits - golden["logits"]).max() / np.abs(golden["logits"]).max())
    print(f"{folder.name:<16}{modules:>9}{len(said):>10}{off:>15.1e}", flush=True)
    return off < 1e-5 and modules > 0 and not said


if __name__ == "__main__":
    sys.exit(main())
