"""``python -m wordrun.plan``."""

import sys

from wordrun.commands.plan import main

sys.exit(main())
