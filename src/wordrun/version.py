"""The version, where every module can import it."""

__version__ = "0.1.0"


def versions() -> str:
    """Return the versions of wordrun and of the torch that it would import, without importing it."""
    from importlib import metadata  # not at the top: ``launch`` starts faster without it

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"wordrun {__version__} ({torch})"
