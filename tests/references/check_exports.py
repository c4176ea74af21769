"""What transformers says to the directories that `write_exports.py` made: one line each, kept in `exports.txt`.

    python tests/references/check_exports.py FOLDER

Every parameter has to be found and none left over, without a warning, and the logits of the golden's longest row have
to be those that it was made with. Run where torch and transformers are installed: `make references`.
"""

import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import text_models  # noqa: F401
import torch
import transformers

GOLDENS = Path(__file__).parent


class Said(logging.Handler):
    """What the library logs at warning and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().splitlines()[0])


def main() -> int:
    """Print a line for each directory; 1 where one is not as it should be."""
    folders = sorted(path.parent for path in Path(sys.argv[1]).glob("*/config.json"))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {len(folders)} directories\n")
    print(f"{'directory':<16}{'tensors':>8}{'missing':>9}{'left over':>11}{'warnings':>10}{'logits off by':>15}")
    return int(sum([not check(folder) for folder in folders]) > 0)


def check(folder: Path) -> bool:
    """Whether a directory loads without a word and computes what its golden says."""
    said = Said()
    transformers.utils.logging.get_logger("transformers").addHandler(said)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", output_loading_info=True
            )
        except Exception as error:  # Whatever it is, the next directories are read all the same.
            print(f"{folder.name:<16} {' '.join(str(error).split())}")
            return False
    transformers.utils.logging.get_logger("transformers").removeHandler(said)
    lines = said.lines + [str(each.message) for each in caught]
    missing, extra = (len(info[name]) for name in ("missing_keys", "unexpected_keys"))
    golden = np.load(GOLDENS / folder.name / "golden.npz")
    row = int(golden["lengths"].argmax())
    with torch.no_grad():
        found = model.eval()(torch.tensor(golden["tokens"][row : row + 1])).logits[0].numpy()
    wanted = golden["logits"][row]
    off = float(np.abs(found - wanted).max() / (golden["logits"].max() - golden["logits"].min()))
    tensors = len(model.state_dict())
    print(f"{folder.name:<16}{tensors:>8}{missing:>9}{extra:>11}{len(lines):>10}{off:>15.1e}")
    for line in lines:
        print(f"    {line}")
    return not (missing or extra or lines) and off < 2e-6


if __name__ == "__main__":
    sys.exit(main())
