"""Finds the call in what a policy wrote. rollout.parse says what the call means.

The text may be cut off anywhere, very long or hostile. Nothing in it runs, and reading it takes bounded time.
"""
import ast
import re
import warnings
from typing import NamedTuple

from .browser import ActionError

NO_CALL = re.compile(r"\s*(#|```|$)")  # a comment, a code fence, an empty line
# A string, closed or not, matches in one way only, so the search never backtracks. With two ways, a response that was
# cut inside a string could take minutes.
STRING_OR_COMMENT = re.compile(r"""
    \#[^\n]*                    # a comment: it may hold a quote
    | (["'])                    # or a string: its quote,
      (\\. | (?!\1)[^\\])*      # escaped characters, and all but this quote,
      (\1 | \\?\Z)              # the quote again, or the end of a text that was cut
    """, re.DOTALL | re.VERBOSE)
LONGEST_CALL = 8000  # characters
MOST_VALUES = 50  # in a call
MOST_TRIES = 20  # to find where a call ends


class RawCall(NamedTuple):
    """A call as Python parses it, such as do("Click", element="12"), not yet checked against rollout.ACTIONS."""
    function: str             # do
    keywords: dict[str, str]  # {"element": "12"}
    positional: list[str]     # ["Click"]


def read_call(text: str) -> RawCall | None:
    """Parses a text that is one call; None if it is not. Nothing in it runs."""
    def as_text(node):
        value = ast.literal_eval(node)
        if value is None:
            return ""
        if isinstance(value, str):
            # JSON writes an emoji as two halves, "\ud83d\ude00". Join them, and replace a half alone.
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return ast.get_source_segment(text, node)  # -3.50 stays as it was written

    # `ast` can fail in any of these ways on a policy's text. Since Python 3.12 it also warns, for example about "\d".
    failures = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            node = ast.parse(text, mode="eval").body
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                return None
            if len(node.keywords) + len(node.args) > MOST_VALUES:  # each costs a pass over the text
                return None
            keywords = {keyword.arg: as_text(keyword.value) for keyword in node.keywords}
            positional = [as_text(value) for value in node.args]
            if len(keywords) < len(node.keywords):  # one was given twice
                return None
        except failures:
            return None
    return RawCall(node.func.id, keywords, positional)


def read_call_over_lines(lines: list[str]) -> RawCall | None:
    """Parses lines that are one call; None if they are not, or are too long.

    A line break inside a string, which Python forbids, is read as \\n.
    """
    as_written = "\n".join(lines).strip()
    if len(as_written) > LONGEST_CALL:
        return None
    escaped = STRING_OR_COMMENT.sub(lambda found: found[0].replace("\n", "\\n"), as_written)
    return read_call(as_written) or read_call(escaped)


def find_call(text: str, functions: tuple[str, ...]) -> RawCall:
    """The one call in `text` of a function that `functions` names. Raises ActionError.

    Lines before it are skipped. After it only comments and code fences may follow.
    """
    call_begins = re.compile(rf"\s*({'|'.join(functions)})\s*\(")
    lines = re.split(r"\r\n?|\n", text)
    begins = [i for i, line in enumerate(lines) if call_begins.match(line)]
    if not begins:
        raise ActionError('no action found; write one call on a line of its own: do(action="Click", element="12")')
    lines = lines[begins[0]:]

    if len("\n".join(lines)) > 2 * LONGEST_CALL:
        raise ActionError(f"the answer is longer than {2 * LONGEST_CALL} characters; write one call")

    # Drop comments after the call, but only until it can be read: a text inside the call may have
    # lines that are empty or begin with "#".
    call = read_call_over_lines(lines)
    tries = 1
    while call is None and tries < MOST_TRIES and NO_CALL.match(lines[-1]):
        lines.pop()
        if ")" in lines[-1]:  # a call can end only on such a line
            call = read_call_over_lines(lines)
            tries += 1
    if call is None and len("\n".join(lines)) > LONGEST_CALL:
        raise ActionError(f"the action is longer than {LONGEST_CALL} characters; write a shorter one")
    if call is None:
        first = lines[0].strip()[:80]
        raise ActionError(f"cannot read the action {first!r}; write one call, nothing after it, "
                          'and \\" for a quote inside a text')
    return call
