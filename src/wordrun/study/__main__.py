"""``python -m wordrun.study``."""

import sys

from wordrun.study.cli import main

sys.exit(main())
