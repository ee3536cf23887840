# Part of block32, under the Apache License v2.0 with LLVM Exceptions.
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Write ``docs/passes.md`` from the registry: the passes, their options, their examples.

python docs/generate_passes.py          writes the page
python docs/generate_passes.py --check  fails if the page is not what would be written
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from block32.passes.base import Pass
from block32.passes.registry import PASSES

PAGE = Path(__file__).parent / "passes.md"
_HEAD = """# Passes

Generated from the registry by `docs/generate_passes.py`. The passes are listed in the order of the
pipeline; each is one file of `passes/`. `block32-opt` runs any of them, mixed with those that the
IREE wheel registers:

```
block32-opt --pass-pipeline='builtin.module(block32-raise,block32-select-kernel)' in.mlir
```

In the IR after a pass, `...` stands for anything. A test runs every example.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n{_section(p)}" for p in PASSES)


def _section(pass_class: type[Pass]) -> str:
    docstring = sys.modules[pass_class.__module__].__doc__ or ""
    _, _, body = docstring.partition("\n\n")
    source = Path(sys.modules[pass_class.__module__].__file__ or "").name
    lines = [
        f"## {pass_class.argument}\n",
        f"{pass_class.summary[0].upper()}{pass_class.summary[1:]} (`passes/{source}`).\n",
    ]
    options = pass_class.option_fields()
    if options:
        names = ", ".join(f"`{f.name.replace('_', '-')}` ({f.type})" for f in options)
        lines.append(f"Options: {names}.\n")
    lines.append(_to_markdown(body))
    return "\n".join(lines)


def _to_markdown(docstring: str) -> str:
    """Indented blocks after ``::`` become fenced code, double backquotes become single ones."""

    def fence(match: re.Match[str]) -> str:
        code = textwrap.dedent(match["code"]).strip("\n")
        return f"{match['intro']}:\n\n```mlir\n{code}\n```\n\n"

    text = re.sub(r"(?P<intro>[^\n]*)::\n\n(?P<code>(?:    [^\n]*\n|\n)+)", fence, docstring)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def main() -> int:
    """Write the page, or check it."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() == page():
            return 0
        print("docs/passes.md is out of date: run python docs/generate_passes.py", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
