"""``launch``: start any command as N distributed ranks.

``parser`` reads the command line, and ``plan`` decides what to run, with ``schedulers``, ``launchers``, ``site``,
``ranks``, ``address`` and ``environment``. ``run`` and ``supervisor`` start, watch and stop it; ``submit`` writes job
scripts. Importing this package imports nothing else.
"""
