"""``wordrun`` and ``python -m wordrun``."""


def main() -> int:
    """Run the command line and return its exit status; Ctrl-C is quiet from here on."""
    from wordrun.common.sigint import end_at_once

    end_at_once()  # before the other imports, which take longer
    from wordrun.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
