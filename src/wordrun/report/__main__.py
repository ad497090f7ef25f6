"""``python -m wordrun.report run=DIR``."""

import sys

from wordrun.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
