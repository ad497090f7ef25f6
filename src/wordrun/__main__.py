"""``python -m wordrun`` is the same as ``wordrun``."""

from wordrun.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
