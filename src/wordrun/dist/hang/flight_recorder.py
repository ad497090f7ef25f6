"""torch's Flight Recorder: the last collectives of this process. Its names are private.

They are not in ``torch_private``, because a thread reads them while the main thread may hang in an import of torch.

Tried with torch 2.8 and 2.13; a version without a name has no records.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def _flight_recorder(*, collectives: bool) -> list[dict[str, Any]]:
    """Return the content of torch's Flight Recorders: gloo's, and NCCL's where it is a separate one."""
    module = sys.modules.get("torch._C._distributed_c10d")
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    return [json.loads(dump(collectives, False)) for name in names if (dump := getattr(module, name, None))]


def collective_counts() -> dict[str, tuple[int, int]]:
    """Return how many collectives of each group have begun and ended; empty for versions without Flight Recorder."""
    return {
        group: (int(each["last_enqueued_collective"]), int(each["last_completed_collective"]))
        for recorder in _flight_recorder(collectives=False)
        for group, each in recorder.get("pg_status", {}).items()
    }


def flight_records() -> list[dict[str, Any]]:
    """Return the last collectives in torch's Flight Recorder, oldest first; empty for versions without it.

    gloo's are in it from torch 2.8 on if ``TORCH_FR_BUFFER_SIZE`` was set before the process group was made, and later
    in any case. Each has group (p2p: between two ranks), seq (its number in the group), op, size and pending.
    """
    found = [each for recorder in _flight_recorder(collectives=True) for each in recorder.get("entries", [])]
    return [
        {
            "group": "p2p" if each["is_p2p"] else each["process_group"][0],
            "seq": each["p2p_seq_id" if each["is_p2p"] else "collective_seq_id"],
            "op": each["profiling_name"].partition(":")[2] or each["profiling_name"],
            "size": _sizes(each["input_dtypes"], each["input_sizes"]), "pending": not each["retired"],
        }
        for each in found
    ]  # fmt: skip


def _sizes(types: list[str], sizes: list[list[int]]) -> str:
    if not sizes:
        return ""
    known = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"}
    first = f"{known.get(types[0], types[0].lower()) if types else ''} {sizes[0]}".strip()
    return first if len(sizes) == 1 else f"{len(sizes)} tensors, the first {first}"


def group_members() -> dict[str, list[int]]:
    """Return the ranks of each of this process's groups, by the Flight Recorder's names; empty if it is unknown."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    members, names = getattr(world, "pg_group_ranks", {}), getattr(world, "pg_names", {})
    return {names[group]: sorted(ranks) for group, ranks in members.items() if group in names}
