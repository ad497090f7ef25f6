"""``launch`` and ``python -m wordrun.launch``."""


def main() -> int:
    """Run the command line and return its exit status; Ctrl-C is quiet from here on."""
    from wordrun.interrupts import end_at_once

    end_at_once("interrupted; nothing was started")  # before the other imports, which take longer
    from wordrun.launch.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
