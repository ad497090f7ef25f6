"""``python -m wordrun`` trains."""

from wordrun.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
