"""``launch`` and ``python -m wordrun.launch``."""

import os


def main() -> int:
    """Run the command line and return its exit status; Ctrl-C is quiet from here on."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a closed stream, whose number a pipe would get: nobody can write to this either
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    from wordrun.common.sigint import end_at_once

    end_at_once("interrupted; nothing was started")  # before the other imports, which take longer
    from wordrun.launch.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
