"""Every golden, loaded and saved again with a config.json of our own making: what `check_exports.py` reads.

python tests/references/write_exports.py FOLDER
"""

import sys
from dataclasses import replace
from pathlib import Path

import meshwright as mw

GOLDENS = Path(__file__).parent


def main() -> None:
    """Save each golden under its name in the folder; one that no config.json describes is said."""
    for path in sorted(GOLDENS.glob("*/config.json")):
        model = mw.load(path.parent, on="cpu:1")
        replace(model, source={}).save(Path(sys.argv[1]) / path.parent.name)


if __name__ == "__main__":
    main()
