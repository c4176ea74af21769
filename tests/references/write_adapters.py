"""Every adapter of PEFT's among the goldens, read and written again by us: what `check_adapters.py` reads.

python tests/references/write_adapters.py FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from meshwright.description.families.adapters import read_adapter_config
from meshwright.description.families.load import load_model
from meshwright.execution.weights.peft import read_adapter, write_adapter

GOLDENS = Path(__file__).parent


def main() -> None:
    """Write each under its name in the folder."""
    for path in sorted(GOLDENS.glob("adapters/*/adapter_config.json")):
        if json.loads(path.read_text())["modules_to_save"]:
            continue  # It is read, not written.
        base = load_model(str(GOLDENS / path.parent.name.partition("-")[0]))
        model = replace(base, lora=read_adapter_config(path.parent, base))
        folder = Path(sys.argv[1]) / path.parent.name
        folder.mkdir(parents=True)
        write_adapter(folder, model, read_adapter(path.parent, model), base=path.parent.name)


if __name__ == "__main__":
    main()
