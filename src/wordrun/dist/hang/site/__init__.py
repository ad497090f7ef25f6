"""A folder for PYTHONPATH: Python runs its sitecustomize in programs that ``launch --hang`` starts."""
