"""Counts the lines in which each fork differs from mgrpo.py.

    python tests/tools/fork_lines.py

A fork's file holds nothing else: what it leaves as it is, it inherits or imports. So the count is that of
the file's code lines, which hold something besides comments and docstrings; the imports and the script's
end count as well. What several forks share (forks/shared.py) is listed by itself.
"""
from pathlib import Path

import reading_cost

ROOT = Path(__file__).parents[2]


def fork_lines() -> dict[str, int]:
    """{fork: code lines}"""
    counts = {}
    for path in sorted((ROOT / "forks").glob("*.py")):
        counts[path.stem] = reading_cost.measure(path, ROOT).code_lines
    return counts


if __name__ == "__main__":
    for name, lines in fork_lines().items():
        print(f"{lines:4}  forks/{name}.py")
