"""What a file asks of its reader: how dense its lines are, and how often it packs several steps into one.

    python tests/tools/reading_cost.py                    # the six files and run.py
    python tests/tools/reading_cost.py ../another/checkout
    python tests/tools/reading_cost.py worlds/browser.py forks/awr.py

    lines       all lines, blank ones and docstrings included
    tokens      Python tokens per code line. A code line holds something besides comments and docstrings.
                Names, operators, numbers and strings count; line ends and indentation do not
    lambda      lambda expressions
    nested      comprehensions inside a comprehension, and comprehensions with two or more `for`
    walrus      assignments inside an expression, `:=`
    if-else     conditional expressions, `a if b else c`
    pairs       assignments of one tuple to another, `a, b = x, y`
    comment %   lines that hold nothing but a comment, of all lines
    calls       calls with five or more positional arguments
    own         names that the file imports from files of this repository

A measure is no goal: a line with few tokens can still be hard to read.
"""
import argparse
import ast
import io
import sys
import tokenize
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIX = ("model.py", "compress.py", "rollout.py", "evaluate.py", "bc.py", "mgrpo.py")
LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Cost:
    """Counts of one file, or of several together."""
    lines: int = 0
    code_lines: int = 0
    code_tokens: int = 0
    comment_lines: int = 0
    lambdas: int = 0
    nested: int = 0
    walrus: int = 0
    conditional: int = 0
    pairs: int = 0
    long_calls: int = 0
    own_names: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        sums = {}
        for field in fields(Cost):
            sums[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return Cost(**sums)

    def row(self) -> list[str]:
        tokens = self.code_tokens / max(1, self.code_lines)
        comments = 100 * self.comment_lines / max(1, self.lines)
        return [str(self.lines), f"{tokens:.1f}", str(self.lambdas), str(self.nested), str(self.walrus),
                str(self.conditional), str(self.pairs), f"{comments:.1f}", str(self.long_calls),
                str(self.own_names)]


HEADER = ["lines", "tokens", "lambda", "nested", "walrus", "if-else", "pairs", "comment %", "calls", "own"]


def docstring_lines(tree: ast.AST) -> set[int]:
    """The numbers of all lines that docstrings stand on."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.update(range(docstring.lineno, docstring.end_lineno + 1))
    return found


def count_lines(text: str, tree: ast.AST, cost: Cost):
    """Lines, code lines, their tokens, and lines that hold only a comment."""
    docstrings = docstring_lines(tree)
    code_lines = set()
    commented = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first = token.start[0]
        if token.type == tokenize.COMMENT:
            commented.add(first)
        elif token.type not in LAYOUT and first not in docstrings:
            cost.code_tokens += 1
            code_lines.update(range(first, token.end[0] + 1))
    cost.lines = len(text.splitlines())
    cost.code_lines = len(code_lines)
    cost.comment_lines = len(commented - code_lines - docstrings)


def is_nested(node: ast.AST) -> bool:
    """Whether a comprehension has two loops, or holds another comprehension."""
    inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS) and child is not node]
    return bool(inner) or len(node.generators) > 1


def is_pair(node: ast.AST) -> bool:
    tuples = (ast.Tuple, ast.List)
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], tuples) and isinstance(node.value, tuples)


def own_names(tree: ast.AST, root: Path) -> set[str]:
    """What a file imports from this repository; `import model` counts as one name."""
    def ours(module: str) -> bool:
        top = module.partition(".")[0]
        return (root / f"{top}.py").exists() or (root / top / "__init__.py").exists()

    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.level or ours(node.module or "")):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def measure(path: Path, root: Path) -> Cost:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    cost = Cost()
    count_lines(text, tree, cost)
    for node in ast.walk(tree):
        cost.lambdas += isinstance(node, ast.Lambda)
        cost.nested += isinstance(node, COMPREHENSIONS) and is_nested(node)
        cost.walrus += isinstance(node, ast.NamedExpr)
        cost.conditional += isinstance(node, ast.IfExp)
        cost.pairs += is_pair(node)
        cost.long_calls += isinstance(node, ast.Call) and len(node.args) >= 5
    cost.own_names = len(own_names(tree, root))
    return cost


def table(files: list[Path], root: Path) -> str:
    rows = [["", *HEADER]]
    total, six = Cost(), Cost()
    for path in files:
        cost = measure(path, root)
        total += cost
        if path.name in SIX and path.parent == root:
            six += cost
        name = path
        if path.is_relative_to(root):
            name = path.relative_to(root)
        rows.append([str(name), *cost.row()])
    if 0 < six.lines < total.lines:
        rows.append(["the six files", *six.row()])
    rows.append(["total", *total.row()])
    width = max(len(row[0]) for row in rows)
    lines = []
    for name, *cells in rows:
        lines.append(f"{name:{width}}" + "".join(f"{cell:>{len(head) + 2}}" for cell, head in zip(cells, HEADER)))
    return "\n".join(lines)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("paths", nargs="*", type=Path, help="files, or one folder that holds a checkout")
    paths = [path.resolve() for path in parser.parse_args().paths]
    root = ROOT
    if not paths or paths[0].is_dir():
        root = paths[0] if paths else ROOT
        paths = [root / name for name in (*SIX, "run.py") if (root / name).exists()]
    for path in paths:
        if not path.is_file():
            sys.exit(f"reading_cost.py: {path} is not a file.")
    if not paths:
        sys.exit(f"reading_cost.py: {root} holds none of {', '.join(SIX)}.")
    print(table(paths, root))


if __name__ == "__main__":
    main()
