"""The versions of wordrun and torch, where every module can import them."""

import re
from pathlib import Path

try:
    from wordrun._version import version  # written when wordrun is installed; made from the newest git tag
except ImportError:  # the source, not installed itself
    version = "unknown"

__version__: str = version

DRIVERS = {"NVIDIA": "proc/driver/nvidia/version", "amdgpu": "sys/module/amdgpu/version"}
"""Files that hold the version of a device's driver."""


def versions() -> str:
    """Return the versions of wordrun and of the torch that it would import, without importing it."""
    from importlib import metadata  # not at the top: ``launch`` starts faster without it

    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"wordrun {__version__} ({torch})"


def torch_build(root: str = "/") -> str:
    """Return torch's version, what it was built for, and the version of the devices' driver below ``root``, if any."""
    import torch

    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    built = ", ".join(f"{kind} {version}" for kind, version in kinds.items() if version)
    facts = [f"built for {built}" if built else "built for CPUs alone"]
    for name, path in DRIVERS.items():
        try:
            found = re.search(r"\d+(\.\d+)+", Path(root, path).read_text())
        except OSError:
            continue
        facts += [f"{name} driver {found[0]}"] if found else []
    return f"torch {torch.__version__} ({', '.join(facts)})"
