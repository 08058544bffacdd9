"""WebArena: its task files, sites, logins and reset, and WebRL's demonstrations for it.

A task file is a list of objects in WebArena's schema. WebArena-Lite's files (VisualAgentBench's
and the paper's) differ in a few types, which reading normalizes. The sites run in your containers;
their addresses are in WebArena's environment variables (SHOPPING=http://HOST:7770 ...). The
accounts are the benchmark's public ones. Login and reset were tested on stand-ins, not on real
containers.
"""

import ast
import asyncio
import contextlib
import copy
import difflib
import http.client
import inspect
import json
import os.path
import re
import socket
import textwrap
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from .browser import first_line, origin, start_pages

# ---------------------------------------------------------------------------- sites and accounts --

# The variable of each site, and the host that models know it by from WebArena's data.
HOSTS = {
    "SHOPPING": "onestopmarket.com",
    "SHOPPING_ADMIN": "luma.com/admin",
    "REDDIT": "reddit.com",
    "GITLAB": "gitlab.com",
    "MAP": "openstreetmap.org",
    "WIKIPEDIA": "wikipedia.org",
    "HOMEPAGE": "homepage.com",
}

# Task files write __SHOPPING__ and the like where the site's address belongs.
PLACEHOLDER = re.compile(f"__({'|'.join([*HOSTS, 'MINIWOB'])})__")


class Account(NamedTuple):
    user: str
    password: str
    form: str    # path of the login form
    inside: str  # path of a page that sends strangers to the form
    word: str    # on that page when logged in, if the form is at the same address


ACCOUNTS = {
    "shopping": Account("emma.lopez@gmail.com", "Password.123", "/customer/account/login/",
                        inside="/wishlist/", word=""),
    "shopping_admin": Account("admin", "admin1234", "", inside="/dashboard", word="Dashboard"),
    "reddit": Account("MarvelsGrantMan136", "test1234", "/login",
                      inside="/user/MarvelsGrantMan136/account", word="Delete"),
    "gitlab": Account("byteblaze", "hello1234", "/users/sign_in", inside="/-/profile", word=""),
}


def accounts_of(storage_state) -> list[str]:
    """Where a task starts logged in: "./.auth/gitlab.reddit_state.json" -> ["gitlab", "reddit"].

    [] if it names none of our accounts: it may be null, or a file that somebody wrote.
    """
    if not isinstance(storage_state, str):
        return []
    names = Path(storage_state).name.removesuffix("_state.json").split(".")
    if not all(name in ACCOUNTS for name in names):
        return []
    return names


# ---------------------------------------------------------------- functions that a task may call --


async def reddit_get_post_url(page, url: str) -> str:
    """The post that a comment's or an edit page's address belongs to."""
    parts = urlsplit(url)
    steps = parts.path.split("/")
    if len(steps) > 3 and steps[1] == "f":
        return f"{parts.scheme}://{parts.netloc}/f/{steps[2]}/{steps[3]}/"
    return url


async def gitlab_get_project_memeber_role(page, account: str) -> str:  # misspelt by the benchmark
    return await page.evaluate("""account => {
        const column = "td[data-label='Account'] span.gl-avatar-labeled-sublabel";
        const names = [...document.querySelectorAll(column)];
        const row = names.findIndex(n => n.outerText === '@' + account);
        const role = document.querySelectorAll("td.col-max-role span")[row];
        return role ? role.outerText : ''; }""", account)


async def ask_shop(page, address: str, query: str) -> dict:
    """The answer of the shop's own interface to the benchmark's administrator."""
    admin = ACCOUNTS["shopping_admin"]
    token = await page.request.post(f"{address}/rest/default/V1/integration/admin/token",
                                    data={"username": admin.user, "password": admin.password})
    headers = {}
    if token.ok:
        headers["Authorization"] = f"Bearer {await token.json()}"
    reply = await page.request.get(f"{address}/rest/V1/{query}", headers=headers)
    if not reply.ok:
        raise ConnectionError(f"the shop {address} answered {reply.status} to {query[:60]}")
    return await reply.json()


async def shopping_get_latest_order_url(page, shop: str) -> str:
    newest = ("searchCriteria[sortOrders][0][field]=created_at"
              "&searchCriteria[sortOrders][0][direction]=DESC"
              "&searchCriteria[pageSize]=1")
    orders = await ask_shop(page, shop, f"orders?{newest}")
    number = int(orders["items"][0]["increment_id"])
    return f"{shop}/sales/order/view/order_id/{number}/"


async def shopping_get_sku_latest_review_author(page, shop: str, sku: str) -> str:
    reviews = await ask_shop(page, shop, f"products/{quote(sku)}/reviews")
    return reviews[-1]["nickname"] if reviews else ""


async def shopping_get_sku_latest_review_rating(page, shop: str, sku: str) -> str:
    reviews = await ask_shop(page, shop, f"products/{quote(sku)}/reviews")
    return str(reviews[-1]["ratings"][0]["percent"]) if reviews else ""


# A program_html target names them: "func:shopping_get_latest_order_url('__SHOPPING__')".
HELPERS = {
    "reddit_get_post_url": reddit_get_post_url,
    "gitlab_get_project_memeber_role": gitlab_get_project_memeber_role,
    "shopping_get_latest_order_url": shopping_get_latest_order_url,
    "shopping_get_sku_latest_review_author": shopping_get_sku_latest_review_author,
    "shopping_get_sku_latest_review_rating": shopping_get_sku_latest_review_rating,
}


def parse_helper(text: str) -> tuple[str, list] | None:
    """'func:name(__page__, "x")' -> (name, ["x"]); None if it is no such call."""
    found = re.fullmatch(r"func:(\w+)\((.*)\)\s*", text, re.DOTALL)
    if found is None:
        return None
    name, inside = found.groups()
    arguments = re.sub("__page__ *,? *", "", inside)
    try:
        return name, ast.literal_eval(f"[{arguments}]")
    except (ValueError, TypeError, SyntaxError):
        return None


def callable_helper(text: str) -> bool:
    """Whether "func:name(...)" names a helper and gives it as many strings as it takes."""
    name, arguments = parse_helper(text) or ("", [])
    if name not in HELPERS or not all(isinstance(argument, str) for argument in arguments):
        return False
    try:
        inspect.signature(HELPERS[name]).bind(None, *arguments)
    except TypeError:
        return False
    return True


async def call_helper(text: str, page, last_url: str) -> str:
    """The value of "func:name(...)" in a task. last_url: the address that the episode ended on."""
    name, arguments = parse_helper(text) or (text, [])
    if name not in HELPERS:
        raise ValueError(f"there is no helper {name}; see --validate.")
    arguments = [last_url if argument == "__last_url__" else argument for argument in arguments]
    try:
        return await HELPERS[name](page, *arguments)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"{name} cannot read the site's answer ({error!r:.100})") from None


# --------------------------------------------------------------- is a row of a task file a task? --

EVAL_TYPES = ("string_match", "url_match", "program_html", "verify")
# The keys of evaluate.MATCHERS
CHECKS = ("exact_match", "must_include", "must_exclude", "one_of", "required_values")
KINDS = (*CHECKS, "fuzzy_match")  # the last takes a language model as judge

REQUIRED = {
    "task_id": (int, str),
    "sites": (list,),
    "intent": (str,),
    "start_url": (str,),
    "eval": (dict,),
}
FIELDS = (*REQUIRED, "storage_state", "serve", "cwd", "ready", "clock", "private", "script", "world", "agent",
          "intent_template", "intent_template_id")
CHECK_FIELDS = ("eval_types", "reference_answers", "reference_url", "url_note", "program_html", "verify",
                "string_note")
PAGE_FIELDS = ("url", "locator", "required_contents", "prep_actions")
START = re.compile(rf"https?://[^/\s]|{PLACEHOLDER.pattern}")
TARGET = re.compile(rf"last$|func:|{START.pattern}")
LOCATOR = re.compile(r"\s*$|document\.|\[\.\.\.document\.|func:")
LIKE_OR = re.compile(r"\|\s*(or|and)\s*\|", re.IGNORECASE)
LIKE_PLACEHOLDER = re.compile(r"(?<!\w)__[A-Za-z][A-Za-z_]*?__(?!\w)")
INEQUALITY = re.compile(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*")


@dataclass
class Findings:
    """What there is to say about one row of a task file."""
    remarks: list[str]  # on what reading it changed, or what is hardly meant
    faults: list[str]  # any of them makes the row unusable


def alternatives(reference) -> list[str]:
    """The texts of which any will do; for anything but a text an empty one, which is a fault."""
    if not isinstance(reference, str):
        return [""]
    return reference.split(" |OR| ")


def check_references(kind: str, value, name: str, found: Findings) -> list:
    """The references of one check, as a list of strings."""
    if isinstance(value, str) and value:  # iterating over it would give letters
        found.remarks.append(f"{name} is a bare string and was wrapped in a list")
        value = [value]

    references = []
    if isinstance(value, list):
        for reference in value:
            if isinstance(reference, (int, float)):
                reference = str(reference)
            references.append(reference)

    parts = []
    for reference in references:
        parts += alternatives(reference)
    texts = parts if kind in ("must_include", "required_values") else references
    for text in texts:
        check_text(kind, text, name, found)
    if not parts or not all(parts):
        found.faults.append(f"{name} is {value!r:.60}; make it a list of non-empty strings")
    elif kind == "required_values" and not all(map(INEQUALITY.fullmatch, parts)):
        found.faults.append(f'{name} is {value!r:.60}; write an operator and a number: "<= 700"')
    return references


def check_text(kind: str, text, name: str, found: Findings):
    """Remarks on a reference that hardly means what it says."""
    if LIKE_OR.search(str(text)):
        found.remarks.append(f"{name} has {text!r:.60}, which is compared as it stands; "
                             'only must_include and required_values read " |OR| "')
    if kind in ("must_include", "must_exclude") and re.fullmatch(r"\s+\w+\s*|\s*\w+\s+", str(text)):
        found.remarks.append(f"{name} has {text!r:.60}, which no word is equal to; leave out the spaces around it")


def check_contents(contents, where: str, found: Findings):
    """Brings {check: references} into uniform types, in place. where: the field it stands in."""
    kinds = ", ".join(KINDS)
    if not isinstance(contents, dict) or all(value is None for value in contents.values()):
        found.faults.append(f"{where} names nothing to check; give it one of {kinds}")
        return
    for kind, value in list(contents.items()):
        name = f"{where}.{kind}"
        if value is None:
            del contents[kind]
        elif kind not in KINDS:
            found.faults.append(f"{name} is an unknown check; use one of {kinds}")
        elif kind == "exact_match":
            contents[kind] = str(value)
            if isinstance(value, str):
                check_text(kind, value, name, found)
            if not isinstance(value, (str, int, float)):
                found.faults.append(f"{name} is {value!r:.60}; make it a string")
        elif kind == "fuzzy_match" and value == "N/A":
            pass  # the judge takes a bare "N/A"
        else:
            contents[kind] = check_references(kind, value, name, found)


def check_call(call: str, where: str, found: Findings) -> str:
    """A "func:..." with the shop's address: its helpers ask the shop's own interface."""
    without_address = r"^func:(shopping_\w+)\((?!['\"]__SHOPPING__['\"])"
    call = re.sub(without_address, r"func:\1('__SHOPPING__', ", call)
    if not callable_helper(call):
        found.faults.append(f"{where} calls {call!r:.60}; write func:NAME('ARGUMENT', ...), "
                            f"NAME one of {', '.join(HELPERS)}")
    return call


def check_target(target, where: str, found: Findings):
    """Brings one page of program_html into uniform types, in place."""
    if not isinstance(target, dict):
        found.faults.append(f"{where} is {target!r:.60}; make it an object with url, locator, "
                            "required_contents")
        return
    url = target.get("url")
    if not isinstance(url, str) or not TARGET.match(url):
        found.faults.append(f'{where}.url is {url!r:.60}; give a whole address, or "last" for '
                            "where the episode ended")
    actions = target.get("prep_actions") or []
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        found.faults.append(f"{where}.prep_actions is {actions!r:.60}; make it a list of "
                            "JavaScript calls")
    locator = target.get("locator")
    if not isinstance(locator, str) or not LOCATOR.match(locator):
        found.faults.append(f'{where}.locator is {locator!r:.60}; use "" for the whole page, or JavaScript '
                            "that begins with document.")
    for key in ("url", "locator"):
        if isinstance(target.get(key), str) and target[key].startswith("func:"):
            target[key] = check_call(target[key], where, found)
    check_contents(target.get("required_contents"), f"{where}.required_contents", found)
    check_names(target, PAGE_FIELDS, f"{where}.", found)


# In an address: characters that a browser escapes, a scheme's own port, capitals in the host's name.
NEVER_SHOWN = re.compile(r"[^\x21-\x7e]|^http://[^/]*:80(/|$)|^https://[^/]*:443(/|$)|^https?://[^/]*[A-Z]")


def check_url(spec: dict, found: Findings):
    """Finds what is wrong with the fields of url_match."""
    references = alternatives(spec.get("reference_url"))
    note = spec.get("url_note")
    if not all(references):
        found.faults.append(f"eval.reference_url is {spec.get('reference_url')!r:.60}; give the URL that the "
                            "episode must end on")
    for reference in references:
        if reference and note != "GOLD in PRED" and not START.match(reference):
            found.faults.append(f'eval.reference_url is {reference!r:.60}; give a whole address, or the url_note '
                                '"GOLD in PRED" if a part is enough')
        if NEVER_SHOWN.search(reference):
            found.remarks.append(f"eval.reference_url {reference!r:.60} is not written as a browser "
                                 "writes it, so no page has this address; copy it from the address bar")
    if note not in (None, "EXACT", "GOLD in PRED"):
        found.faults.append(f'eval.url_note is {note!r:.60}; use "EXACT" or "GOLD in PRED"')


def check_eval(spec: dict, found: Findings):
    """Brings a task's "eval" into uniform types. Ignores fields that its eval_types do not use."""
    types = spec.get("eval_types")
    known = isinstance(types, list) and all(kind in EVAL_TYPES for kind in types)
    if not types or not known:
        found.faults.append(f"eval.eval_types is {types!r:.60}; make it a list of "
                            f"{', '.join(EVAL_TYPES)}")
        return
    if "string_match" in types:
        check_contents(spec.get("reference_answers"), "eval.reference_answers", found)
    if "url_match" in types:
        check_url(spec, found)
    if "verify" in types:
        file = spec.get("verify")
        if not isinstance(file, str) or not file:
            found.faults.append(f"eval.verify is {file!r:.60}; name a Python file with "
                                "verify(server_url) -> (bool, str)")
    if "program_html" in types:
        targets = spec.get("program_html")
        if not isinstance(targets, list) or not targets:
            found.faults.append(f"eval.program_html is {targets!r:.60}; make it a list of objects, one for each page "
                                "to look at")
            return
        for i, target in enumerate(targets):
            check_target(target, f"eval.program_html[{i}]", found)


def check_names(fields: dict, known: tuple, where: str, found: Findings):
    """Remarks on keys that nobody reads and that look like one that is missing."""
    for key in fields:
        near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.8)
        if key not in known and near and near[0] not in fields:
            found.remarks.append(f"{where}{key} is not read; did you mean {near[0]}?")


def check_field(task: dict, key: str, found: Findings):
    """A field that every task has."""
    if key not in task:
        found.faults.append(f"{key} is missing; add it")
        return
    value = task[key]
    kinds = REQUIRED[key]
    right_type = isinstance(value, kinds) and not isinstance(value, bool)  # True is an int
    is_empty = value in ("", [])
    if is_empty or not right_type:
        names = " or ".join(kind.__name__ for kind in kinds)
        found.faults.append(f"{key} is {value!r:.60}; make it a non-empty {names}")
    elif key == "sites" and not all(isinstance(site, str) for site in value):
        found.faults.append(f"sites is {value!r:.60}; make it a list of names")
    elif key == "start_url" and not all(map(START.match, start_pages(task))):
        found.faults.append(f"start_url is {value!r:.60}; give http://HOST:PORT/..., for a site of your own with serve "
                            "http://127.0.0.1:{port}/..., or one of WebArena's names, such as __SHOPPING__")


# An address of this machine, with a port in numbers or none.
LOOPBACK = re.compile(r"https?://(?:localhost|127\.0\.0\.1)(?::\d+)?(?![\w:.])")


def check_served(task: dict, found: Findings):
    """The fields of a task whose site is started by a command (serve.py)."""
    if "serve" not in task:
        if "{port}" in str(task.get("start_url")):
            found.faults.append("start_url names {port}; add serve, the command that starts the site there")
        return
    command = task["serve"]
    if not isinstance(command, str) or "{port}" not in command or "\0" in command:
        found.faults.append(f"serve is {command!r:.60}; write the command that starts the site, "
                            "with {port} for its port")
    start_url = task.get("start_url")
    begins_at = str(start_url).replace("localhost", "127.0.0.1")
    if not begins_at.startswith("http://127.0.0.1:{port}"):
        found.faults.append(f"start_url is {start_url!r:.60}; a task with serve starts at "
                            "http://127.0.0.1:{port}/...")
    for address in LOOPBACK.findall(json.dumps(task.get("eval"))):
        found.faults.append(f"eval names {address}, where this task's server is not; write its port as {{port}}, at "
                            "the host of start_url")
    checks = task.get("eval")
    looked_at = json.dumps(checks.get("program_html")) if isinstance(checks, dict) else ""
    for host in ("127.0.0.1", "localhost"):
        address = f"http://{host}:{{port}}"
        if address in looked_at and not str(start_url).startswith(address):
            found.remarks.append(f"eval looks at {address}, which does not share the cookies of start_url's host; "
                                 "write the same host in both")
    ready = task.get("ready", "/")
    if not isinstance(ready, str) or not ready.startswith("/"):
        found.faults.append(f'ready is {ready!r:.60}; make it a path on the server, such as "/"')
    cwd = task.get("cwd", ".")
    if not isinstance(cwd, str) or "\0" in cwd:
        found.faults.append(f"cwd is {task['cwd']!r:.60}; make it the name of a folder")
    for key in ("cwd", "ready", "start_url", "eval"):
        if "{tmp}" in str(task.get(key)):
            found.faults.append(f"{key} names {{tmp}}; only serve can, since each episode has a folder of "
                                "its own")


def check_page_settings(task: dict, found: Findings):
    """The fields that Browser.open reads, where a task has them."""
    if "clock" in task:
        try:
            datetime.fromisoformat(task["clock"])
        except (ValueError, TypeError):
            found.faults.append(f"clock is {task['clock']!r:.60}; write it like 2026-03-07T12:00:00")
    private = task.get("private", [])
    if not isinstance(private, list) or not all(str(path).startswith("/") for path in private):
        found.faults.append(f'private is {private!r:.60}; make it a list of paths such as "/api/"')
    if not isinstance(task.get("script", ""), str):
        found.faults.append(f"script is {task['script']!r:.60}; make it JavaScript")


def check_row(row) -> tuple[dict, list[str], list[str]]:
    """A row -> (task in uniform types, remarks, faults)."""
    if not isinstance(row, dict):
        return {}, [], [f"it is {type(row).__name__}; make it an object"]
    task = copy.deepcopy(row)
    found = Findings(remarks=[], faults=[])
    for key in REQUIRED:
        check_field(task, key, found)
    if task.get("storage_state") == "":  # WebArena-Lite's tasks on the map and Wikipedia, which need no account
        task["storage_state"] = None
    state = task.get("storage_state")
    if not isinstance(state, (str, dict, type(None))):
        found.faults.append(f"storage_state is {state!r:.60}; make it the name of a file, or null")
    if isinstance(task.get("eval"), dict):
        check_eval(task["eval"], found)
        check_names(task["eval"], CHECK_FIELDS, "eval.", found)
    written = json.dumps([task.get("start_url"), task.get("eval")])
    for name in sorted(set(LIKE_PLACEHOLDER.findall(written))):
        near = difflib.get_close_matches(name.strip("_").upper(), HOSTS, n=1, cutoff=0.8)
        if near and not PLACEHOLDER.fullmatch(name):
            found.remarks.append(f"{name} stands for no site; did you mean __{near[0]}__?")
    for key in ("intent_template_id", "flaw"):
        if not isinstance(task.get(key), (int, str, type(None))):
            found.faults.append(f"{key} is {task[key]!r:.60}; make it a number or a text")
    check_served(task, found)
    check_page_settings(task, found)
    check_names(task, FIELDS, "", found)
    return task, found.remarks, found.faults


# ------------------------------------------------------------------------------------ task files --


def read_rows(path: str) -> list:
    try:
        rows = json.loads(Path(path).read_bytes())
        json.dumps(rows, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no half surrogates
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the task file {path} ({error}); give a JSON file in "
                         "WebArena's format, sandbox:train, sandbox:test, sandbox:test-unseen, "
                         "infinity:CLONE, or miniwob:NAME,...") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"the task file {path} holds no list of tasks; make it a list of objects.")
    return rows


def anchor(task: dict, folder: Path) -> list[str]:
    """Makes the file names in a task absolute, in place; returns faults. They are relative to folder.

    os.path.isfile is False for a text that cannot be a file's name; Path's own methods raise.
    """
    faults = []
    if "serve" in task:
        cwd = os.path.abspath(folder / task.get("cwd", "."))
        task["cwd"] = cwd
        if not os.path.isdir(cwd):
            faults.append(f"cwd {cwd} is not a folder")
    if "verify" in task["eval"]["eval_types"]:
        file = os.path.abspath(folder / task["eval"]["verify"])
        task["eval"]["verify"] = file
        if not os.path.isfile(file):
            faults.append(f"eval.verify {file} does not exist")
    state = task.get("storage_state")
    if isinstance(state, str) and not accounts_of(state):
        file = os.path.abspath(folder / state)
        task["storage_state"] = file
        if not os.path.isfile(file):
            faults.append(f"storage_state {file:.200} does not exist; write it with Playwright, name it after some "
                          f"of {', '.join(ACCOUNTS)}, or set it to null")
        else:
            faults += login_faults(Path(file), task)
    return faults


def login_faults(file: Path, task: dict) -> list[str]:
    """What is wrong with a saved login: it cannot be read, has expired, or is for this machine's other name."""
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        cookies = saved.get("cookies", [])
        places = saved.get("origins", [])
        hosts = {cookie["domain"] for cookie in cookies}
        hosts |= {urlsplit(place["origin"]).hostname for place in places}
        now = time.time()
        valid = [cookie for cookie in cookies if not 0 <= cookie.get("expires", -1) < now]  # -1: until Chromium ends
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return [f"storage_state {file} is not a login as Playwright saves it ({first_line(error)}); save it again"]
    if not cookies and not places:
        return [f"storage_state {file} holds no cookie and no storage; log in, then save it again, or set "
                "storage_state to null"]
    if cookies and not valid and (not places or "serve" in task):
        return [f"storage_state {file} has expired; log in, then save it again"]
    if not cookies and "serve" in task and hosts <= {"127.0.0.1", "localhost"}:
        return [f"storage_state {file} has only localStorage, which a copy of the site on another port does not see; "
                "let the task's script set it"]
    starts = {origin(page.replace("{port}", "80")).rpartition(":")[0] for page in start_pages(task)}
    for here, other in (("127.0.0.1", "localhost"), ("localhost", "127.0.0.1")):
        if starts == {f"http://{here}"} and hosts == {other}:
            return [f"storage_state {file} has cookies for {other}, but the task starts at {here}; start it at {other}"]
    return []


def read_tasks(path: str) -> tuple[list[dict], list[str], list[str]]:
    """A task file -> (usable tasks, remarks, faults), each remark and fault naming its row."""
    return check_rows(read_rows(path), Path(path).parent)


def check_rows(rows: list, folder: Path) -> tuple[list[dict], list[str], list[str]]:
    """As `read_tasks`. folder: where the file names in the rows begin."""
    tasks = []
    remarks = []
    faults = []
    row_of = {}  # {task_id: its row}
    for i, row in enumerate(rows):
        task, row_remarks, row_faults = check_row(row)
        if not row_faults:
            row_faults = anchor(task, folder)
        if not row_faults:
            first = row_of.setdefault(str(task["task_id"]), i)
            if first != i:
                row_faults = [f"row {first} already has this task_id; give each row its own"]
        ids = [f"{key} {task[key]!s:.40}" for key in ("task_id", "old_task_id") if key in task]
        where = f"row {i}"
        if ids:
            where += f" ({', '.join(ids)})"
        remarks += [f"{where}: {text}" for text in row_remarks]
        faults += [f"{where}: {text}" for text in row_faults]
        if not row_faults:
            tasks.append(task)
    return tasks, remarks, faults


def answer_contents(task: dict) -> list[dict]:
    """[{check: references} of the answer], or [] if the eval_types do not use it."""
    spec = task["eval"]
    if "string_match" not in spec["eval_types"]:
        return []
    return [spec["reference_answers"]]


def page_contents(task: dict) -> list[dict]:
    """{check: references} of each page to look at; [] if the eval_types do not use them."""
    spec = task["eval"]
    if "program_html" not in spec["eval_types"]:
        return []
    return [target["required_contents"] for target in spec["program_html"]]


def needs_judge(task: dict) -> bool:
    """Whether only a language model could judge it."""
    every = answer_contents(task) + page_contents(task)
    return any("fuzzy_match" in contents for contents in every)


def describe(path: str, tasks: list[dict], remarks: list[str], faults: list[str]) -> int:
    """Prints what a source of tasks holds and what is broken in it; returns the exit status."""
    # 1) Count.
    evaluators = Counter()
    answers = Counter()
    pages = Counter()
    sites = Counter()
    impossible = 0  # those whose reference is N/A
    judged = 0
    flawed = defaultdict(list)
    for task in tasks:
        types = " + ".join(task["eval"]["eval_types"])
        evaluators[types] += 1
        names = " + ".join(task["sites"])
        sites[names] += 1
        for contents in answer_contents(task):
            kinds = " + ".join(sorted(contents))
            answers[kinds] += 1
            if any(value in ("N/A", ["N/A"]) for value in contents.values()):
                impossible += 1
        for contents in page_contents(task):
            pages.update(contents.keys())
        if needs_judge(task):
            judged += 1
        if "flaw" in task:
            flawed[task["flaw"]].append(str(task["task_id"]))
    broken = {fault.split(":")[0] for fault in faults}  # "row 3 (...)"

    # 2) Print the counts.
    print(f"{path}: {len(tasks)} usable tasks, {len(broken)} broken rows")
    titled = {"evaluators": evaluators, "answers by": answers, "pages by": pages, "sites": sites}
    for title, counts in titled.items():
        listed = ", ".join(f"{name} {n}" for name, n in counts.most_common())
        print(f"  {title:<12}{listed}")
    print(f"  {judged} tasks need an LLM judge, {len(tasks) - judged} do not; "
          f"{impossible} have the reference N/A")
    for flaw, ids in flawed.items():
        text = f"  {flaw}: {len(ids)} tasks: {', '.join(ids)}"
        print(textwrap.fill(text, width=100, subsequent_indent="    ", break_on_hyphens=False))

    # 3) Print the remarks and what is broken, 50 lines at most.
    lines = [f"remark  {text}" for text in remarks]
    lines += [f"BROKEN  {text}" for text in faults]
    for line in lines[:50]:
        print(f"  {line}")
    if len(lines) > 50:
        print(f"  ... and {len(lines) - 50} more")
    return 1 if faults else 0


def playable(path: str, sites: dict[str, str], judge: bool) -> list[dict]:
    """The tasks of a file that can be played. Raises ValueError if the file has faults.

    If a site has an address, each gets "hosts": see `hosts_of`.
    judge: whether there is a language model as judge; else tasks that need one are left out.
    """
    from run import print0  # not above: run imports torch, and the sandbox's process does without

    tasks, remarks, faults = read_tasks(path)
    if faults:
        raise ValueError(f"the task file {path} has faults ({len(faults)}), the first in {faults[0]} "
                         f"(python evaluate.py --validate {path} lists all).")
    for remark in remarks:
        print0(f"{path}, {remark}")
    usable = tasks
    if not judge:
        usable = [task for task in tasks if not needs_judge(task)]
    if len(usable) < len(tasks):
        left_out = len(tasks) - len(usable)
        print0(f"{path}: left out {left_out} tasks that need a language model as judge "
               f"(--judge-url); {len(usable)} of {len(tasks)} remain")

    hosts = hosts_of(sites)
    if not hosts:
        return usable
    return [{**task, "hosts": hosts} for task in usable]


def hosts_of(sites: dict[str, str]) -> dict[str, str]:
    """{"reddit.com": the site's real address, ...}, the longest address first: one may begin with another."""
    known = []
    for name, host in HOSTS.items():
        address = sites.get(name, "").rstrip("/")
        if "://" in address:  # HOMEPAGE=PASS is no address
            known.append((host, address))
    known.sort(key=lambda pair: len(pair[1]), reverse=True)
    return dict(known)


# ------------------------------------------------------------------------------------- addresses --


def address_of(name: str, sites: dict[str, str], task_id) -> str:
    if not sites.get(name):
        raise ValueError(f"task {task_id} uses the site __{name}__, but {name} is not set; "
                         f"export {name}=http://HOST:PORT.")
    return sites[name].rstrip("/")


def with_addresses(value, sites: dict[str, str], task_id):
    """A JSON value of a task, with the sites' addresses for the placeholders in its texts."""
    if isinstance(value, dict):
        return {key: with_addresses(inner, sites, task_id) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_addresses(inner, sites, task_id) for inner in value]
    if isinstance(value, str):
        return PLACEHOLDER.sub(lambda found: address_of(found[1], sites, task_id), value)
    return value


def site_urls(tasks: list[dict], sites: dict[str, str]) -> list[dict]:
    """The tasks with addresses for __SHOPPING__ and the like, in start page and evaluators."""
    filled = []
    for task in tasks:
        task = dict(task)
        for key in ("start_url", "eval"):
            task[key] = with_addresses(task[key], sites, task["task_id"])
        filled.append(task)
    return filled


def check_login(task: dict, sites: dict[str, str]):
    """Raises ValueError if a site where the task starts logged in has no address."""
    state = task.get("storage_state")
    for name in accounts_of(state):
        variable = name.upper()
        if not sites.get(variable):
            raise ValueError(f"task {task['task_id']} starts logged in ({state}), but {variable} "
                             f"is not set; export {variable}=http://HOST:PORT.")


def require_server(url: str):
    """Opens a connection to a page's server and closes it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):  # SHOPPING=localhost:7770 would mean port 80
        raise ValueError("it does not begin with http://")
    usual = 443 if parts.scheme == "https" else 80
    socket.create_connection((parts.hostname, parts.port or usual), timeout=10).close()


def check_reach(tasks: list[dict], sites: dict[str, str]):
    """Raises ValueError if a start page's server does not answer or a task cannot start logged in."""
    servers = {}  # each is asked once, for the last task that starts there
    for task in tasks:
        check_login(task, sites)
        if "serve" in task:  # it is not up yet
            continue
        for url in start_pages(task):
            origin = "/".join(url.split("/")[:3])
            servers[origin] = (url, task)
    for url, task in servers.values():
        try:
            require_server(url)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"cannot reach {url}, where task {task['task_id']} starts ({error}); "
                             "start the site, or correct its variable or start_url.") from None


# ---------------------------------------------------------------------------------------- logins --


async def logged_in(browser_context, name: str, address: str) -> bool:
    """Whether the cookies of a browser context still open the site."""
    account = ACCOUNTS[name]
    response = await browser_context.request.get(address + account.inside)
    if not response.ok:
        return False
    if account.form and account.form.rstrip("/") in urlsplit(response.url).path:
        return False
    return account.word in await response.text()


async def log_in(browser_context, name: str, address: str):
    """Fills in the form with a password field: labels and ids differ between versions."""
    account = ACCOUNTS[name]
    page = await browser_context.new_page()
    await page.goto(address + account.form)
    form = page.locator("form:has(input[type=password]:visible)").first
    password = form.locator("input[type=password]:visible").first
    user = form.locator("input:is([type=text], [type=email], :not([type])):visible").first
    await user.fill(account.user)
    await password.fill(account.password)
    async with page.expect_navigation():
        await password.press("Enter")
    await page.close()
    if not await logged_in(browser_context, name, address):
        raise ConnectionError(f"logging in to {name} at {address} as {account.user} did not work")


class Logins:
    """Storage states with a session on the sites, one for each episode that is running.

    The sites keep the session on their side: episodes that shared one would be logged out together.
    """

    def __init__(self, sites: dict[str, str]):
        self.sites = sites
        self.free: dict[str, list[dict]] = {}  # logged in and not in use, by the accounts they hold

    @contextlib.asynccontextmanager
    async def hold(self, browser, storage_state, seconds: float):
        """Yields the storage state to start an episode with; later another episode may have it.

        browser: a Browser. storage_state: the task's; it is yielded if it names no account.
        """
        accounts = accounts_of(storage_state)
        if not accounts:
            yield storage_state
            return

        free = self.free.setdefault(".".join(accounts), [])
        state = free.pop() if free else None
        async with browser.one_at_a_time:  # one login at a time spares the sites
            try:
                state = await asyncio.wait_for(self.renew(browser, accounts, state), seconds)
            except asyncio.TimeoutError:
                raise ConnectionError(f"logging in took longer than {seconds:.0f} s") from None
        try:
            yield state
        finally:
            free.append(state)

    async def renew(self, browser, accounts: list[str], state: dict | None) -> dict:
        """The state after logging in wherever it holds no session, or one that has expired."""
        browser_context = await browser.chromium.new_context(storage_state=state)
        try:
            for name in accounts:
                address = self.sites[name.upper()].rstrip("/")
                if not await logged_in(browser_context, name, address):
                    await log_in(browser_context, name, address)
            return await browser_context.storage_state()
        finally:
            await browser_context.close()


# ------------------------------------------------------------------------ the server that resets --


def get(url: str) -> tuple[int, str]:
    """(status, text) of an address."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def reset(url: str, patience: float = 1800, pause: float = 1):
    """Asks WebArena's reset server for fresh sites; returns when they are up, after minutes.

    patience: seconds until it gives up. pause: seconds between questions. Raises ValueError if the reset fails or
    takes longer.
    """
    url = url.rstrip("/")
    until = time.monotonic() + patience

    def ask(question: str) -> tuple[int, str]:
        try:
            return get(f"{url}/{question}")
        except ValueError as error:
            raise ValueError(f"--reset-url {url}: {error}; write http://HOST:PORT.") from None

    try:
        status, text = ask("reset")
        failed = status not in (200, 418)  # 418: a reset is already running
        while "Ready" not in text and not failed:
            if time.monotonic() > until:
                raise ValueError(f"the sites at {url} were not reset after {patience:.0f} s, and it says: "
                                 f"{text.strip()[:99]}; look at its log.")
            time.sleep(pause)  # containers are starting; nothing would notify us
            status, text = ask("status")
            failed = status >= 400
    except http.client.HTTPException:
        raise ValueError(f"what answers at {url} is not a reset server: it does not speak HTTP; "
                         "correct --reset-url.") from None
    except OSError as error:
        raise ValueError(f"cannot reach the reset server {url} ({error}); start it, or drop "
                         "--reset-url.") from None
    if failed:
        raise ValueError(f"the reset at {url} failed: {status} {text.strip()[:99]}; "
                         "look at its log.")


# ------------------------------------------------------------------------ WebRL's demonstrations --

# web_policy_sft.json has a row for each step, with all that came before in one flat text: "Task
# Instruction: ...", then rounds of ASKED, page, ANSWERED, response. Only the last round shows its
# page.
ASKED = re.compile(r"Round \d+\n\n<\|eot_id\|><\|start_header_id\|>user<\|end_header_id\|>\n")
ANSWERED = "\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
BLOCKS = set("""address article aside body dd div dl dt fieldset footer form header h1 h2 h3 h4 h5
                h6 hr html iframe legend li main nav ol p pre section table tbody tfoot thead tr
                ul""".split())


class WebRLPage(HTMLParser):
    """A page in WebRL's notation, <tag id="7" title="..." data-bbox="...">name</tag>.

    text: the page in our notation, as a rollout shows it.
    """

    def __init__(self, html: str):
        super().__init__()
        self.lines = [[]]  # words by line
        self.open = []  # (tag, attributes, the lines outside) of open tags
        self.feed(html)
        self.close()
        while self.open:
            self.handle_endtag(self.open[-1][0])
        self.text = "\n".join(" ".join(line) for line in self.lines if line)

    def handle_starttag(self, tag, attributes):
        self.end_input()
        attributes = dict(attributes)
        if tag in BLOCKS:
            self.lines.append([])
        self.open.append((tag, attributes, self.lines))
        if "id" in attributes:
            self.lines = [[]]  # text inside a usable element is its name

    def handle_data(self, data):
        if data.strip():
            self.end_input()
            self.lines[-1].append(escape(" ".join(data.split()), quote=False))

    def end_input(self):
        if self.open and self.open[-1][0] == "input":  # its end tag may be missing
            self.handle_endtag("input")

    def handle_endtag(self, tag):
        if tag not in [name for name, _, _ in self.open]:
            return
        closed = None
        while closed != tag:  # end tags inside may be missing
            closed, attributes, outside = self.open.pop()
            if "id" in attributes:
                words = sum(self.lines, [])
                self.lines = outside
                self.lines[-1].append(self.usable(closed, attributes, words))
            if closed in BLOCKS:
                self.lines.append([])

    @staticmethod
    def usable(tag: str, attributes: dict, words: list[str]) -> str:
        """A usable element in our notation. words: the texts inside it."""
        kind = attributes.get("type", "")
        if tag == "input" and kind in ("checkbox", "radio"):
            tag = kind
        elif tag == "input" and kind in ("submit", "button", "reset", "image"):
            tag = "button"
        said = {key: escape(value or "", quote=False) for key, value in attributes.items()}

        # 1) Its name: the text inside, else the first of these attributes that says something
        name = " ".join(words)
        if tag == "select":
            name = ""  # the texts inside are its options
        naming = ("data-text", "title", "value", "placeholder", "data-testid")
        if tag in ("input", "textarea", "select"):
            naming = ("data-label", "placeholder", "title")
        for key in naming:
            if not name:
                name = said.get(key, "")

        # 2) Its value
        value = ""
        if tag == "checkbox":
            value = {"checked": "on", "not-checked": "off"}.get(said.get("data-status"), "")
        elif tag == "select":
            value = f"{said.get('data-text', '')} ({' | '.join(words)})"
        elif tag == "input":
            value = said.get("data-value") or said.get("value", "")
        elif tag == "textarea":
            value = said.get("data-value", "")
        if value:
            value = f" = {value}"
        return f"<{tag}>{name} <{said['id']}>{value}</{tag}>"


class Step(NamedTuple):
    """A row of WebRL's file."""
    intent: str
    past: tuple[str, ...]  # the earlier responses
    page: str
    response: str


def read_step(row: dict) -> Step:
    asked, response = [turn["value"] for turn in row["conversations"]]
    task, *rounds = ASKED.split(asked)
    is_step = task.startswith("Task Instruction: ") and len(rounds) > 0
    pages = []
    answers = []
    for text in rounds:
        page, mark, answer = text.partition(ANSWERED)
        if not mark:
            is_step = False
        pages.append(page)
        answers.append(answer.strip())
    if not is_step:
        raise ValueError("this is not a step in WebRL's format")
    past = answers[:-1]  # the answer to the last round is `response`
    return Step(intent=task.removeprefix("Task Instruction: ").strip(),
                past=tuple(past),
                page=pages[-1],
                response=response.strip())


def join_steps(steps: list[Step]) -> list[dict]:
    """Steps in any order, with our pages -> trajectories, as in trajectories.jsonl.

    A step belongs to a trajectory that begins with its past and its response. The observation of a
    turn whose step is missing is None: later steps tell its response, but not its page.
    """
    records = []
    beginning = {}  # (intent, responses) -> the records that begin with these responses
    # The last step of a trajectory comes first: its past holds all responses.
    for step in sorted(steps, key=lambda step: len(step.past), reverse=True):
        said = (*step.past, step.response)
        t = len(step.past)

        # 1) A trajectory that begins with these responses and lacks this page.
        record = None
        for known in beginning.get((step.intent, said), []):
            if known["turns"][t]["observation"] is None:
                record = known
                break

        # 2) If there is none: a new trajectory.
        if record is None:
            turns = [{"url": "", "observation": None, "response": response} for response in said]
            record = {"task_id": len(records), "sites": [], "intent": step.intent, "turns": turns}
            records.append(record)
            for k in range(1, len(said) + 1):
                key = (step.intent, said[:k])
                beginning.setdefault(key, []).append(record)

        record["turns"][t]["observation"] = step.page
    return records


def flaw(step: Step, parse_element) -> str:
    """Why a step is not to be learned; "" if it is."""
    try:
        element = parse_element(step.response)
    except ValueError:
        return "no action can be read from the response"
    if element is not None and f'id="{element}"' not in step.page:
        return "acts on an element that is not on its page"
    return ""


def webrl_demonstrations(rows: list[tuple[str, dict]], parse_element) -> tuple[list[dict], Counter]:
    """Rows of web_policy_sft.json -> (records as in trajectories.jsonl, {reason: rows left out}).

    rows: (where it stands, row); errors name the place. parse_element(response): the id of the
    element that the response acts on, or None; raises ValueError if no action can be read.
    """
    from run import reading  # not above, as in `playable`

    steps = []
    dropped = Counter()
    for where, row in rows:
        with reading(where):
            step = read_step(row)
            reason = flaw(step, parse_element)
            if reason:
                dropped[reason] += 1
            else:
                steps.append(step._replace(page=WebRLPage(step.page).text))
    return join_steps(steps), dropped
