"""``python -m wordrun.prepare``."""

from wordrun.prepare.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
