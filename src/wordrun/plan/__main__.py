"""``python -m wordrun.plan``."""

import sys

from wordrun.plan.cli import main

sys.exit(main())
