"""The entry point of `python -m meshwright COMMAND …`."""

import sys

from meshwright.cli.main import main

sys.exit(main())
