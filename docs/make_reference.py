"""Generate docs/reference.md (all options with types, defaults and meanings, and all metrics) and man/ from the code.

python docs/make_reference.py
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import make_man
import make_status

from wordrun.common.section import value_text
from wordrun.config.registry import documentation
from wordrun.config.schema import SECTIONS, SEVERAL, schemas
from wordrun.track.base import LEGEND

HEAD = """\
# Reference

Generated from the code by `python docs/make_reference.py`; a test keeps it current.

`KEY=VALUE` sets an option, `GROUP=NAME` chooses a group's file. `null` means that the value is determined at run time.

"""


def render() -> str:
    """Return the text of docs/reference.md."""
    parts = [HEAD]
    for group in SECTIONS:
        nodes = {name: part.options for name, part in schemas(group).items() if not part.origin}
        for name, schema in nodes.items():
            if len(nodes) > 1 and not own_fields(schema):
                continue
            title = f"{group} ({name})" if len(nodes) > 1 else group
            parts.append(
                f"## {title}\n\n{inspect.getdoc(schema)}\n\n| option | type | default | meaning |\n|---|---|---|---|\n"
            )
            prefix = f"{group}.{name}" if group in SEVERAL else group
            parts += [row(prefix, schema, field) for field in fields(schema)]
            parts.append("\n")
    parts.append("## Metrics\n\n| name | meaning |\n|---|---|\n")
    parts += [f"| `{name}` | {meaning} |\n" for name, meaning in LEGEND.items()]
    return "".join(parts)


def own_fields(schema: type[Any]) -> bool:
    """Say whether ``schema`` has more than a name."""
    return any(field.name != "name" for field in fields(schema))


def row(prefix: str, schema: type[Any], field: Any) -> str:
    """Return the table row of one option."""
    default = field.default_factory() if field.default is MISSING else field.default
    shown = repr(default) if isinstance(default, str) else value_text(default)
    kind = str(field.type).replace("|", "\\|")
    meaning = " ".join(documentation(schema)[field.name].split())  # a row is one line
    return f"| `{prefix}.{field.name}` | {kind} | `{shown}` | {meaning} |\n"


if __name__ == "__main__":
    make_man.write()
    make_status.write()
    Path(__file__).with_name("reference.md").write_text(render(), encoding="utf-8")
