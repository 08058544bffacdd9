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
HEADER = ("lines", "tokens", "lambda", "nested", "walrus", "if-else", "pairs", "comment %", "calls", "own")
LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # what may have a docstring


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
            name = field.name
            sums[name] = getattr(self, name) + getattr(other, name)
        return Cost(**sums)

    def cells(self) -> list[str]:
        """What stands below HEADER."""
        tokens = self.code_tokens / max(1, self.code_lines)
        comments = 100 * self.comment_lines / max(1, self.lines)
        return [
            str(self.lines),
            f"{tokens:.1f}",
            str(self.lambdas),
            str(self.nested),
            str(self.walrus),
            str(self.conditional),
            str(self.pairs),
            f"{comments:.1f}",
            str(self.long_calls),
            str(self.own_names),
        ]


def docstring_lines(tree: ast.AST) -> set[int]:
    """The numbers of all lines that docstrings stand on."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            found.update(range(docstring.lineno, docstring.end_lineno + 1))
    return found


def count_lines(text: str, tree: ast.AST, cost: Cost):
    """Lines, code lines, their tokens, and lines that hold only a comment."""
    docstrings = docstring_lines(tree)
    code_lines = set()
    commented = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        first, _ = token.start
        last, _ = token.end
        if token.type == tokenize.COMMENT:
            commented.add(first)
        elif token.type not in LAYOUT and first not in docstrings:
            cost.code_tokens += 1
            code_lines.update(range(first, last + 1))
    cost.lines = len(text.splitlines())
    cost.code_lines = len(code_lines)
    cost.comment_lines = len(commented - code_lines - docstrings)


def is_nested(comprehension: ast.AST) -> bool:
    """Whether it has two loops, or holds another comprehension."""
    if len(comprehension.generators) > 1:
        return True
    for node in ast.walk(comprehension):
        if isinstance(node, COMPREHENSIONS) and node is not comprehension:
            return True
    return False


def is_pair(assignment: ast.Assign) -> bool:
    """Whether it assigns one tuple to another."""
    tuples = (ast.Tuple, ast.List)
    return isinstance(assignment.targets[0], tuples) and isinstance(assignment.value, tuples)


def count_nodes(tree: ast.AST, cost: Cost):
    """The kinds of expressions that pack several steps into one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            cost.lambdas += 1
        elif isinstance(node, COMPREHENSIONS) and is_nested(node):
            cost.nested += 1
        elif isinstance(node, ast.NamedExpr):
            cost.walrus += 1
        elif isinstance(node, ast.IfExp):
            cost.conditional += 1
        elif isinstance(node, ast.Assign) and is_pair(node):
            cost.pairs += 1
        elif isinstance(node, ast.Call) and len(node.args) >= 5:
            cost.long_calls += 1


def is_ours(module: str, root: Path) -> bool:
    """Whether a module's outermost name is a file or a package of this repository."""
    top, _, _ = module.partition(".")
    file = root / f"{top}.py"
    package = root / top / "__init__.py"
    return file.exists() or package.exists()


def own_names(tree: ast.AST, root: Path) -> set[str]:
    """What a file imports from this repository; `import model` counts as one name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_ours(alias.name, root):
                    found.add(alias.name)
        elif isinstance(node, ast.ImportFrom):
            relative = node.level > 0
            if relative or is_ours(node.module, root):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def measure(path: Path, root: Path) -> Cost:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    cost = Cost()
    count_lines(text, tree, cost)
    count_nodes(tree, cost)
    cost.own_names = len(own_names(tree, root))
    return cost


def costs(files: list[Path], root: Path) -> list[tuple[str, Cost]]:
    """(name, cost) of each file, then of the six together if there are others as well, then of all."""
    named = []
    six = Cost()
    total = Cost()
    for path in files:
        cost = measure(path, root)
        total += cost
        if path.name in SIX and path.parent == root:
            six += cost
        name = path
        if path.is_relative_to(root):
            name = path.relative_to(root)
        named.append((str(name), cost))
    if 0 < six.lines < total.lines:
        named.append(("the six files", six))
    named.append(("total", total))
    return named


def table(files: list[Path], root: Path) -> str:
    rows = [("", HEADER)]
    for name, cost in costs(files, root):
        rows.append((name, cost.cells()))

    width = max(len(name) for name, _ in rows)
    lines = []
    for name, cells in rows:
        line = f"{name:{width}}"
        for head, cell in zip(HEADER, cells):
            line += f"{cell:>{len(head) + 2}}"
        lines.append(line)
    return "\n".join(lines)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("paths", nargs="*", type=Path, help="files, or one folder that holds a checkout")
    args = parser.parse_args()
    files = [path.resolve() for path in args.paths]

    # 1) A checkout instead of files: this one, or the one given.
    root = ROOT
    if files and files[0].is_dir():
        root = files[0]
        files = []
    if not files:
        places = [root / name for name in (*SIX, "run.py")]
        files = [place for place in places if place.exists()]

    # 2) What cannot be measured.
    for path in files:
        if not path.is_file():
            sys.exit(f"reading_cost.py: {path} is not a file.")
    if not files:
        sys.exit(f"reading_cost.py: {root} holds none of {', '.join(SIX)}.")

    print(table(files, root))


if __name__ == "__main__":
    main()
