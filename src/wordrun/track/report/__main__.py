"""``python -m wordrun.track.report run=DIR``."""

import sys

from wordrun.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
