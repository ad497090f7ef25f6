"""``python -m wordrun.data.prepare``."""

if __name__ == "__main__":
    from wordrun.common.interrupts import end_at_once

    end_at_once()  # before the other imports, which take longer
    from wordrun.commands.prepare import main

    raise SystemExit(main())
