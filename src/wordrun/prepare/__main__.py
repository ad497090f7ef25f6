"""``python -m wordrun.prepare``."""

if __name__ == "__main__":
    from wordrun.interrupts import end_at_once

    end_at_once()  # before the other imports, which take longer
    from wordrun.prepare.cli import main

    raise SystemExit(main())
