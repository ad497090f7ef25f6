"""``launch``: turn any command into N ranks that know each other.

``options`` reads the command line, ``job`` says what machine this is, ``launcher`` finds mpiexec or torchrun,
``command`` turns these into one ``Plan`` (pure), and ``run`` starts, watches and stops it.
Importing this package imports nothing else.
"""
