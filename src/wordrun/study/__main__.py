"""``python -m wordrun.study``."""

import sys

from wordrun.commands.study import main

sys.exit(main())
