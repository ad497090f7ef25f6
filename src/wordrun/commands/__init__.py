"""The commands of ``wordrun NAME``, a module with ``main(argv) -> int`` each."""
