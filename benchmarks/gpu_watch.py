"""Runs a program like ``python FILE ...`` or ``python -m MODULE ...``, and at its end prints its peak device memory."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the program that the arguments name, in this process."""
    sys.argv = sys.argv[1:]
    try:
        if sys.argv[0] == "-m":
            sys.argv, sys.path[0] = sys.argv[1:], os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # not the folder of this file
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        import torch

        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
        print(f"\npeak device memory: {peak} allocated, {reserved} reserved", flush=True)


if __name__ == "__main__":
    main()
