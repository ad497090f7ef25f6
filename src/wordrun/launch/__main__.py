"""``python -m wordrun.launch`` is the same as ``launch``."""

import sys

from wordrun.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
