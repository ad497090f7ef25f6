"""A Python process that a test starts, and whose program runs in a fork of a process that has imported torch.

Importing torch and a trainer takes 2 to 3 s of processor time, which tests of a run's results need not pay for each
rank. The process passes its arguments, folder, environment and streams on, then signals, and ends as the program does.
When it is killed, the program is. See ``programs`` for the other end.
"""

import json
import os
import signal
import socket
import sys
from types import FrameType

VARIABLE = "PROGRAMS_OF_TESTS"
"""Names the socket; without it, programs run where they are started."""
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def program_of(argv: list[str]) -> list[str] | None:
    """Return the script or ``-m module``, and its arguments, if a process with this command line may import torch."""
    words = argv[2:] if argv[1:2] == ["-u"] else argv[1:]
    if words[:1] == ["-m"]:
        name = words[1]
        ours = f"{name}.".startswith("wordrun.") and not f"{name}.".startswith("wordrun.launch.")
    else:
        ours = bool(words) and (words[0].endswith(".py") or os.path.basename(words[0]) == "wordrun")
    return words if ours else None


def run(words: list[str], path: str) -> None:
    """Let the program run, and end as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    env = dict(os.environ)
    request = {
        "words": words,
        "folder": os.getcwd(),
        "env": env,
        "cores": list(os.sched_getaffinity(0)),
        "unbuffered": sys.orig_argv[1] == "-u" or bool(env.get("PYTHONUNBUFFERED")),
    }
    fds = [0, 1, 2, *([int(env["PMI_FD"])] if "PMI_FD" in env else [])]
    message = json.dumps(request).encode()
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], fds)
    connection.sendall(message)
    reader = connection.makefile()
    pid = int(reader.readline())

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(pid, number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    status = int(reader.readline() or "1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
