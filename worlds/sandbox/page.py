"""What the sites share: the types between site and server, HTML building blocks, the style, logging in and out.

A site is one module with
    ROOT                      its first path segment, "/shop"
    seed(rng, people, sites)  its data: a dataclass of dicts ("tables") with immutable rows; people[0] is the one logged
                              in; sites: the data of those seeded before, by name; a table taken from there is shared
    nav(user)                 the links above every page
    ROUTES                    (method, pattern below ROOT, handler(tables, request, *groups) -> Page | Redirect)
Rows are never changed, only replaced, so a private copy of a whole site is a dict.copy() per table.
Pages are all lower-case and short: a small policy reads them on a CPU. Their one use of JavaScript is to ask "are you sure".
"""

import math
import re
from functools import wraps
from html import escape
from typing import NamedTuple
from urllib.parse import urlencode

KEEP = object()  # Redirect.user: leave the session as it is


class Request(NamedTuple):
    user: str | None  # who is logged in
    query: dict[str, str]
    form: dict[str, str]  # empty for GET


class Page(NamedTuple):
    title: str
    body: str
    status: int = 200


class Redirect(NamedTuple):
    path: str  # below the site's ROOT
    user: object = KEEP  # a name logs the session in, None logs it out


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #223; background: #f4f5f7; margin: 0 }
header, main { max-width: 46rem; margin: 0 auto; padding: .6rem 1.2rem }
header { display: flex; gap: 1.5rem; align-items: center; justify-content: space-between }
nav, header form { display: flex; gap: .8rem; align-items: center; white-space: nowrap } header input { width: 9rem }
main form[method=get] { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem } form[method=get] label { min-width: 0 }
main { background: #fff; border: 1px solid #dde; border-radius: 10px; padding-bottom: 1.2rem }
h1 { font-size: 1.4rem; margin: .4rem 0 } h2 { font-size: 1.05rem; margin: .8rem 0 .2rem } p { margin: .3rem 0 }
a { color: #1856b8; text-decoration: none } a:hover { text-decoration: underline }
ul { list-style: none; padding: 0; margin: .4rem 0 } li { padding: .2rem 0; border-bottom: 1px solid #eef }
table { border-collapse: collapse; width: 100% } td { padding: .3rem .4rem; border-bottom: 1px solid #eef }
th { padding: .3rem .4rem; border-bottom: 1px solid #bbc; text-align: left; font-weight: 600 }
input, select, textarea, button { font: inherit; padding: .2rem .5rem; border: 1px solid #bbc; border-radius: 6px }
main form label { display: inline-block; min-width: 5rem } input[type=number] { width: 4rem }
textarea { width: 24rem; height: 2.6rem; vertical-align: top }
button { background: #1856b8; border-color: #1856b8; color: #fff; cursor: pointer }
nav button { background: none; border: none; color: #1856b8; padding: 0 }
.error { color: #b3261e } .tiles { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem }
"""


# ---- building blocks
def document(title: str, header: str, body: str) -> str:
    """A whole page; `header` and `body` are HTML already."""
    # The style is inline because a fresh browser context has an empty cache: a file would cost a request an episode.
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>"
        f"<body><header>{header}</header><main>{body}</main></body></html>"
    )


def link(text: str, href: str) -> str:
    return f'<a href="{escape(href)}">{escape(text)}</a>'


def items(rows) -> str:
    """A list; its rows are HTML already."""
    lines = "".join(f"<li>{row}</li>" for row in rows)
    return f"<ul>{lines}</ul>"


def labelled(name: str, control: str) -> str:
    """A control of a form, after the label that names it."""
    return f'<label for="{name}">{name}</label> {control}'


def field(name: str, value: object = "", kind: str = "text") -> str:
    text = escape(str(value))
    control = f'<input id="{name}" name="{name}" type="{kind}" value="{text}">'
    return labelled(name, control)


def area(name: str, value: str = "") -> str:
    control = f'<textarea id="{name}" name="{name}">{escape(value)}</textarea>'
    return labelled(name, control)


def select(name: str, options, chosen: str = "") -> str:
    choices = ""
    for option in options:
        mark = " selected" if option == chosen else ""
        choices += f"<option{mark}>{escape(option)}</option>"
    control = f'<select id="{name}" name="{name}">{choices}</select>'
    return labelled(name, control)


def form(
    *fields: str,
    submit: str,
    action: str = "",
    method: str = "post",
) -> str:
    """A form that sends its fields, one a line, to `action` (default: the page's own address)."""
    target = f' action="{escape(action)}"' if action else ""
    button = f"<button>{submit}</button>"
    lines = "".join(f"<p>{line}</p>" for line in (*fields, button))
    return f'<form method="{method}"{target}>{lines}</form>'


def press(text: str, action: str, ask: str = "") -> str:
    """A form that is one button; `ask` is the question of the dialog that comes before it is sent."""
    asking = f""" onsubmit="return confirm('{ask}')\"""" if ask else ""
    button = f"<p><button>{text}</button></p>"
    return f'<form method="post" action="{escape(action)}"{asking}>{button}</form>'


def fact(label: str, value: object) -> str:
    """A label and a value, which has the label as its id."""
    key = label.replace(" ", "-")
    text = escape(str(value))
    return f'<p>{label} <span id="{key}">{text}</span></p>'


def table(head, rows) -> str:
    """The cells are HTML already."""
    def line(tag, cells):
        inside = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    first = line("th", head)
    others = "".join(line("td", row) for row in rows)
    return f"<table>{first}{others}</table>"


def error(text: str) -> str:
    """The sentence that says what is wrong; nothing when `text` is empty."""
    if not text:
        return ""
    return f'<p class="error" role="alert">{escape(text)}</p>'


def refused(text: str) -> Page:
    body = f"<h1>not allowed</h1><p>{escape(text)}</p>"
    return Page("not allowed", body, 403)


NOT_FOUND = Page("not found", "<h1>not found</h1><p>this page does not exist</p>", 404)


# ---- what visitors send
def unfit(name: str, text: str, limit: int = 60) -> str:
    """The sentence that a form shows, or an empty string when the text is fine."""
    if not text.strip():
        return f"{name} must not be empty"
    if len(text) > limit:
        return f"{name} must have at most {limit} characters"
    return ""


def whole_number(text: str) -> int | None:
    """None when the text is anything else, or longer than six digits."""
    if re.fullmatch("[0-9]{1,6}", text):
        return int(text)
    return None


def paginate(
    rows: list,
    request: Request,
    per_page: int,
    here: str,
) -> tuple[list, str]:
    """The rows of the page that the query asks for, and links to its neighbours, which keep the rest of the query."""
    filled = math.ceil(len(rows) / per_page)
    pages = max(1, filled)
    asked = whole_number(request.query.get("page", "")) or 1
    number = min(max(asked, 1), pages)

    neighbours = []
    if number > 1:
        neighbours.append(("previous page", number - 1))
    if number < pages:
        neighbours.append(("next page", number + 1))

    links = []
    for text, target in neighbours:
        query = urlencode(request.query | {"page": target})
        links.append(link(text, f"{here}?{query}"))

    start = (number - 1) * per_page
    shown = rows[start:start + per_page]
    if not links:
        return shown, ""
    return shown, f"<p>{' '.join(links)}</p>"


# ---- above every page
def navigation(
    root: str,
    user: str | None,
    links: list[tuple[str, str]],
) -> str:
    """The links above every page; a visitor gets fewer."""
    if user:
        shown = links
        out = f'<form method="post" action="{root}/logout"><button>log out</button></form>'
    else:
        shown = [("home", root), ("log in", f"{root}/login")]
        out = ""
    joined = " ".join(link(text, href) for text, href in shown)
    return f"<nav>{joined}{out}</nav>"


def search_box(root: str) -> str:
    return (
        f'<form action="{root}/search">'
        '<input name="q" aria-label="search" placeholder="search">'
        "<button>go</button></form>"
    )


# ---- logging in and out
def members_only(handler):
    """Sends whoever is not logged in to the login form."""
    @wraps(handler)
    def guarded(tables, request, *groups):
        if not request.user:
            return Redirect("/login")
        return handler(tables, request, *groups)
    return guarded


def login_page(tables, request, problem=""):
    name = request.form.get("username", "")
    username = field("username", name)
    secret = field("password", kind="password")
    body = f"<h1>log in</h1>{error(problem)}"
    body += form(username, secret, submit="log in")
    return Page("log in", body)


def login(tables, request):
    name = request.form.get("username", "")
    account = tables.accounts.get(name)
    if account is None or account.password != request.form.get("password"):
        return login_page(tables, request, "wrong username or password")
    return Redirect("", user=account.user)


def logout(tables, request):
    return Redirect("", user=None)


LOGIN_ROUTES = [
    ("GET", "/login", login_page),
    ("POST", "/login", login),
    ("POST", "/logout", logout),
]
