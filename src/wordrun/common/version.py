"""The version, where every module can import it."""

try:
    from wordrun._version import version  # written when wordrun is installed; made from the newest git tag
except ImportError:  # the source, not installed itself
    version = "unknown"

__version__: str = version


def versions() -> str:
    """Return the versions of wordrun and of the torch that it would import, without importing it."""
    from importlib import metadata  # not at the top: ``launch`` starts faster without it

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"wordrun {__version__} ({torch})"
