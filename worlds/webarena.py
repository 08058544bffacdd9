"""WebArena: its task files, sites, logins and reset, and WebRL's demonstrations for it.

A task file is a list of objects in WebArena's schema. WebArena-Lite's files (VisualAgentBench's and
the paper's) differ in a few types, which reading normalizes. The sites run in your containers; their
addresses are in WebArena's environment variables (SHOPPING=http://HOST:7770 ...). The accounts are
the benchmark's public ones. Login and reset were tested on stand-ins, not on real containers.
"""

import ast
import asyncio
import contextlib
import copy
import inspect
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

# The variable of each site, and the host that models know it by from WebArena's data.
HOSTS = {"SHOPPING": "onestopmarket.com", "SHOPPING_ADMIN": "luma.com/admin",
         "REDDIT": "reddit.com", "GITLAB": "gitlab.com", "MAP": "openstreetmap.org",
         "WIKIPEDIA": "wikipedia.org", "HOMEPAGE": "homepage.com"}

# ---- task files
# The keys of evaluate.MATCHERS
CHECKS = ("exact_match", "must_include", "must_exclude", "one_of", "required_values")

PLACEHOLDER = re.compile(f"__({'|'.join([*HOSTS, 'MINIWOB'])})__")
START = re.compile(rf"https?://[^/\s]|{PLACEHOLDER.pattern}")
REQUIRED = {"task_id": (int, str), "sites": (list,), "intent": (str,), "start_url": (str,),
            "eval": (dict,)}
EVAL_TYPES = ("string_match", "url_match", "program_html")
INEQUALITY = re.compile(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*")


def check_contents(contents, field: str):
    """Brings {check: references} into uniform types, in place. Yields (remark, is it a fault)."""
    kinds = ", ".join((*CHECKS, "fuzzy_match"))
    if not isinstance(contents, dict) or all(value is None for value in contents.values()):
        yield f"{field} names nothing to check; give it one of {kinds}", True
        return
    for key, value in list(contents.items()):
        name = f"{field}.{key}"
        if value is None:
            del contents[key]
        elif key not in (*CHECKS, "fuzzy_match"):
            yield f"{name} is an unknown check; use one of {kinds}", True
        elif key == "exact_match":
            contents[key] = str(value)
            if not isinstance(value, (str, int, float)):
                yield f"{name} is {value!r:.60}; make it a string", True
        elif (key, value) != ("fuzzy_match", "N/A"):
            if isinstance(value, str) and value:  # iterating over it would give letters
                yield f"{name} is a bare string and was wrapped in a list", False
                value = [value]
            refs = value if isinstance(value, list) else []
            refs = [str(ref) if isinstance(ref, (int, float)) else ref for ref in refs]
            contents[key] = refs
            if not refs or not all(isinstance(r, str) and all(r.split(" |OR| ")) for r in refs):
                yield f"{name} is {value!r:.60}; make it a list of non-empty strings", True
            elif key == "required_values" and not all(
                    INEQUALITY.fullmatch(part) for ref in refs for part in ref.split(" |OR| ")):
                yield f'{name} is {value!r:.60}; write an operator and a number: "<= 700"', True


def check_target(target, field: str):
    """A program_html target, like check_contents."""
    if not isinstance(target, dict):
        yield f"{field} is {target!r:.60}; make it an object with url, locator, required_contents", True
        return
    url, locator = target.get("url"), target.get("locator")
    actions = target.get("prep_actions") or []
    if not isinstance(url, str) or not re.match(rf"last$|func:|{START.pattern}", url):
        yield (f'{field}.url is {url!r:.60}; give a whole address, or "last" for where the episode '
               "ended", True)
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        yield f"{field}.prep_actions is {actions!r:.60}; make it a list of JavaScript calls", True
    known = r"\s*$|document\.|\[\.\.\.document\.|func:"
    if not isinstance(locator, str) or not re.match(known, locator):
        yield f'{field}.locator is {locator!r:.60}; use "" for the whole page, or JavaScript', True
    for key, call in (("url", url), ("locator", locator)):
        if isinstance(call, str) and call.startswith("func:"):
            # These helpers ask the shop's own interface and need its address.
            without = r"^func:(shopping_\w+)\((?!'__SHOPPING__')"
            call = target[key] = re.sub(without, r"func:\1('__SHOPPING__', ", call)
            if not callable_helper(call):
                yield (f"{field} calls {call!r:.60}; write func:NAME('ARGUMENT', ...), NAME one of "
                       f"{', '.join(HELPERS)}", True)
    yield from check_contents(target.get("required_contents"), f"{field}.required_contents")


def check_eval(spec: dict):
    """A task's "eval", like check_contents. Fields that the eval_types do not use are ignored."""
    types = spec.get("eval_types")
    if not isinstance(types, list) or not types or not all(t in EVAL_TYPES for t in types):
        yield f"eval.eval_types is {types!r:.60}; make it a list of {', '.join(EVAL_TYPES)}", True
        return
    if "string_match" in types:
        yield from check_contents(spec.get("reference_answers"), "eval.reference_answers")
    if "url_match" in types:
        reference, note = spec.get("reference_url"), spec.get("url_note")
        if not isinstance(reference, str) or not all(reference.split(" |OR| ")):
            yield "eval.reference_url is empty; give the URL that the episode must end on", True
        if note not in (None, "EXACT", "GOLD in PRED"):
            yield f'eval.url_note is {note!r:.60}; use "EXACT" or "GOLD in PRED"', True
    if "program_html" in types:
        targets = spec.get("program_html")
        if not isinstance(targets, list) or not targets:
            yield "eval.program_html is not a list of objects; describe each page to look at", True
            return
        for i, target in enumerate(targets):
            yield from check_target(target, f"eval.program_html[{i}]")


def check_row(row) -> tuple[dict, list[str], list[str]]:
    """A row -> (task in uniform types, remarks on what was changed, faults)."""
    if not isinstance(row, dict):
        return {}, [], [f"it is {type(row).__name__}; make it an object"]
    task, remarks, faults = copy.deepcopy(row), [], []
    for key, kinds in REQUIRED.items():
        value, names = task.get(key), " or ".join(kind.__name__ for kind in kinds)
        if key not in task:
            faults.append(f"{key} is missing; add it")
        elif not isinstance(value, kinds) or value in ("", []) or isinstance(value, bool):
            faults.append(f"{key} is {value!r:.60}; make it a non-empty {names}")
        elif key == "sites" and not all(isinstance(site, str) for site in value):
            faults.append(f"sites is {value!r:.60}; make it a list of names")
        elif key == "start_url" and not all(map(START.match, value.split(" |AND| "))):
            faults.append(f"start_url is {value!r:.60}; give http://HOST:PORT/... or __SHOPPING__ ...")
    if not isinstance(state := task.get("storage_state"), (str, dict, type(None))):
        faults.append(f"storage_state is {state!r:.60}; make it the name of a file, or null")
    if isinstance(task.get("eval"), dict):
        for remark, broken in check_eval(task["eval"]):
            (faults if broken else remarks).append(remark)
    return task, remarks, faults


def read_tasks(path: str) -> tuple[list[dict], list[str], list[str]]:
    """A task file -> (usable tasks, remarks, faults), each remark and fault naming its row."""
    try:
        rows = json.loads(Path(path).read_bytes())
        json.dumps(rows, ensure_ascii=False, allow_nan=False).encode()  # no NaN, no half surrogates
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read the task file {path} ({error}); give a JSON file in WebArena's "
                         "format, sandbox:train, sandbox:test, sandbox:test-unseen, or miniwob:NAME,..."
                         ) from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"the task file {path} holds no list of tasks; make it a list of objects.")
    tasks, remarks, faults = [], [], []
    for i, row in enumerate(rows):
        task, changed, broken = check_row(row)
        ids = [f"{key} {task[key]!s:.40}" for key in ("task_id", "old_task_id") if key in task]
        where = f"row {i}" + (f" ({', '.join(ids)})" if ids else "")
        remarks += [f"{where}: {text}" for text in changed]
        faults += [f"{where}: {text}" for text in broken]
        tasks += [] if broken else [task]
    return tasks, remarks, faults


def validate(path: str) -> int:
    """Prints what a task file holds and what is broken in it; returns the exit status."""
    tasks, remarks, faults = read_tasks(path)
    answers = sum((answers_and_pages(task)[0] for task in tasks), [])
    pages = sum((answers_and_pages(task)[1] for task in tasks), [])
    na = sum(any(v in ("N/A", ["N/A"]) for v in contents.values()) for contents in answers)
    judged = sum(map(needs_judge, tasks))
    counts = {"evaluators": Counter(" + ".join(task["eval"]["eval_types"]) for task in tasks),
              "answers by": Counter(" + ".join(sorted(contents)) for contents in answers),
              "pages by": Counter(key for contents in pages for key in contents),
              "sites": Counter(" + ".join(task["sites"]) for task in tasks)}
    broken = {fault.split(":")[0] for fault in faults}
    print(f"{path}: {len(tasks)} usable tasks, {len(broken)} broken rows")
    for title, counter in counts.items():
        print(f"  {title:<12}" + ", ".join(f"{name} {n}" for name, n in counter.most_common()))
    print(f"  {judged} tasks need an LLM judge, {len(tasks) - judged} do not; "
          f"{na} have the reference N/A")
    shown = [f"changed  {text}" for text in remarks] + [f"BROKEN  {text}" for text in faults]
    for line in shown[:50]:
        print(f"  {line}")
    if len(shown) > 50:
        print(f"  ... and {len(shown) - 50} more")
    return 1 if faults else 0


def playable(path: str, sites: dict[str, str], judge: bool, log=print) -> list[dict]:
    """The tasks of a file that can be played. "hosts": the address behind "reddit.com" ..."""
    rows, remarks, faults = read_tasks(path)
    if faults:
        raise ValueError(f"the task file {path} has {len(faults)} faults, the first in {faults[0]} "
                         f"(python evaluate.py --validate {path} lists all).")
    for remark in remarks:
        log(f"{path}, {remark}")
    usable = [task for task in rows if judge or not needs_judge(task)]
    if len(usable) < len(rows):
        log(f"{path}: left out {len(rows) - len(usable)} tasks that need a language model as judge "
            f"(--judge-url); {len(usable)} of {len(rows)} remain")
    # Longest address first: one may begin with another.
    named = sorted(filter(sites.get, HOSTS), key=lambda name: -len(sites[name]))
    hosts = {HOSTS[name]: sites[name].rstrip("/") for name in named}
    return [task | {"hosts": hosts} if hosts else task for task in usable]


def answers_and_pages(task: dict) -> tuple[list[dict], list[dict]]:
    """([reference_answers] or [], the required_contents of the pages), if the eval_types use them."""
    spec = task["eval"]
    return ([spec["reference_answers"]] if "string_match" in spec["eval_types"] else [],
            [page["required_contents"] for page in spec["program_html"]]
            if "program_html" in spec["eval_types"] else [])


def needs_judge(task: dict) -> bool:
    """Whether only a language model could judge it."""
    return any("fuzzy_match" in contents for contents in sum(answers_and_pages(task), []))


# ---- WebRL's demonstrations (web_policy_sft.json): one row a step, the history before it as flat text
ASKED = re.compile(r"Round \d+\n\n<\|eot_id\|><\|start_header_id\|>user<\|end_header_id\|>\n")
ANSWERED = "\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
BLOCKS = set("""address article aside body dd div dl dt fieldset footer form header h1 h2 h3 h4 h5 h6
                hr html iframe legend li main nav ol p pre section table tbody tfoot thead tr
                ul""".split())


class WebRLPage(HTMLParser):
    """A page in WebRL's notation, <tag id="7" title="..." data-bbox="...">name</tag>; `text` is ours."""

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
        if tag in BLOCKS:
            self.lines.append([])
        self.open.append((tag, dict(attributes), self.lines))
        if "id" in self.open[-1][1]:
            self.lines = [[]]  # text inside a usable element is its name

    def handle_data(self, data):
        if data.strip():
            self.end_input()
            self.lines[-1].append(escape(" ".join(data.split()), quote=False))

    def end_input(self):
        if self.open and self.open[-1][0] == "input":  # its end tag may be missing
            self.handle_endtag("input")

    def handle_endtag(self, tag):
        if tag not in (name for name, *_ in self.open):
            return
        while True:
            name, attributes, outside = self.open.pop()
            if "id" in attributes:
                words, self.lines = sum(self.lines, []), outside
                inside = (" | " if name == "select" else " ").join(words)
                self.lines[-1].append(self.usable(name, attributes, inside))
            if name in BLOCKS:
                self.lines.append([])
            if name == tag:
                return

    @staticmethod
    def usable(tag: str, attributes: dict, inside: str) -> str:
        kind = attributes.get("type", "")
        if tag == "input" and kind in ("checkbox", "radio"):
            tag = kind
        elif tag == "input" and kind in ("submit", "button", "reset", "image"):
            tag = "button"
        said = {key: escape(value or "", quote=False) for key, value in attributes.items()}
        named = ("data-text", "title", "value", "placeholder", "data-testid")
        if tag in ("input", "textarea", "select"):
            named = ("data-label", "placeholder", "title")
        name = "" if tag == "select" else inside
        name = name or next((said[key] for key in named if said.get(key)), "")
        states = {"checked": "on", "not-checked": "off"}
        value = {"checkbox": states.get(said.get("data-status"), ""),
                 "select": f"{said.get('data-text', '')} ({inside})",
                 "input": said.get("data-value") or said.get("value", ""),
                 "textarea": said.get("data-value", "")}.get(tag, "")
        return f"<{tag}>{name} {said['id']}{value and ' = ' + value}</{tag}>"


def read_step(row: dict) -> tuple[str, tuple[str, ...], str, str]:
    """A row -> (intent, the earlier responses, the page, the response). bc.py adds the row's place to errors."""
    asked, answered = (turn["value"] for turn in row["conversations"])
    task, *rounds = ASKED.split(asked)
    rounds = [part.partition(ANSWERED) for part in rounds]
    if not task.startswith("Task Instruction: ") or not rounds or not all(mark for _, mark, _ in rounds):
        raise ValueError("this is not a step in WebRL's format")
    past = tuple(response.strip() for _, _, response in rounds[:-1])
    return task.removeprefix("Task Instruction: ").strip(), past, rounds[-1][0], answered.strip()


def join_steps(steps: list[tuple]) -> list[dict]:
    """Steps -> trajectories, as in trajectories.jsonl. If a step is missing, "observation" is None."""
    records, starting = [], {}
    for intent, past, page, response in sorted(steps, key=lambda step: -len(step[1])):
        said, t = (*past, response), len(past)
        same = starting.get((intent, said), ())  # trajectories that begin with these responses
        record = next((r for r in same if r["turns"][t]["observation"] is None), None)
        if record is None:
            turns = [{"url": "", "observation": None, "response": text} for text in said]
            record = {"task_id": len(records), "sites": [], "intent": intent, "turns": turns}
            records.append(record)
            for k in range(len(said)):
                starting.setdefault((intent, said[:k + 1]), []).append(record)
        record["turns"][t]["observation"] = WebRLPage(page).text
    return records


# ---- sites
def site_urls(tasks: list[dict], sites: dict[str, str]) -> list[dict]:
    """The tasks with addresses for the placeholders (__SHOPPING__ ...) in start page and evaluators."""
    def fill(value, task):
        if isinstance(value, dict):
            return {key: fill(v, task) for key, v in value.items()}
        if isinstance(value, list):
            return [fill(v, task) for v in value]
        if isinstance(value, str):
            return PLACEHOLDER.sub(lambda match: address(match[1], task), value)
        return value

    def address(name, task):
        if not sites.get(name):
            raise ValueError(f"task {task['task_id']} uses the site __{name}__, but {name} is not set; "
                             f"export {name}=http://HOST:PORT.")
        return sites[name].rstrip("/")

    return [task | {key: fill(task[key], task) for key in ("start_url", "eval")} for task in tasks]


def check_reach(tasks: list[dict], sites: dict[str, str]):
    """Raises if a start page's server does not answer or a task cannot start logged in."""
    origins = {}
    for task in tasks:
        origins |= {"/".join(url.split("/")[:3]): (url, task) for url in task["start_url"].split(" |AND| ")}
        state = task.get("storage_state")
        accounts = accounts_of(state)
        if missing := [name.upper() for name in accounts if not sites.get(name.upper())]:
            raise ValueError(f"task {task['task_id']} starts logged in ({state}), but {missing[0]} is "
                             f"not set; export {missing[0]}=http://HOST:PORT.")
        if isinstance(state, str) and not accounts and not Path(state).exists():
            raise ValueError(f"task {task['task_id']} starts logged in through {state}, which does not "
                             "exist; write it with Playwright, name it after some of "
                             f"{', '.join(ACCOUNTS)}, or set it to null.")
    for url, task in origins.values():
        try:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https"):  # SHOPPING=localhost:7770 would mean port 80
                raise ValueError("it does not begin with http://")
            address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, timeout=10).close()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"cannot reach {url}, where task {task['task_id']} starts ({error}); start "
                             "the site, or correct its variable or start_url.") from None


# ---- the functions that a program_html target may name
def parse_helper(text: str) -> tuple[str, list] | None:
    """'func:name(__page__, "x")' -> (name, ["x"]); None if it is no such call."""
    found = re.fullmatch(r"func:(\w+)\((.*)\)\s*", text, re.DOTALL)
    try:
        return found and (found[1], ast.literal_eval(f"[{re.sub('__page__ *,? *', '', found[2])}]"))
    except (ValueError, TypeError, SyntaxError):
        return None


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
    headers = {"Authorization": f"Bearer {await token.json()}"} if token.ok else {}
    reply = await page.request.get(f"{address}/rest/V1/{query}", headers=headers)
    if not reply.ok:
        raise ConnectionError(f"the shop {address} answered {reply.status} to {query[:60]}")
    return await reply.json()


async def shopping_get_latest_order_url(page, shop: str) -> str:
    newest = {"[sortOrders][0][field]": "created_at", "[sortOrders][0][direction]": "DESC",
              "[pageSize]": 1}
    query = "&".join(f"searchCriteria{key}={value}" for key, value in newest.items())
    orders = await ask_shop(page, shop, f"orders?{query}")
    return f"{shop}/sales/order/view/order_id/{int(orders['items'][0]['increment_id'])}/"


async def shopping_get_sku_latest_review_author(page, shop: str, sku: str) -> str:
    reviews = await ask_shop(page, shop, f"products/{quote(sku)}/reviews")
    return reviews[-1]["nickname"] if reviews else ""


async def shopping_get_sku_latest_review_rating(page, shop: str, sku: str) -> str:
    reviews = await ask_shop(page, shop, f"products/{quote(sku)}/reviews")
    return str(reviews[-1]["ratings"][0]["percent"]) if reviews else ""


HELPERS = {f.__name__: f for f in (
    reddit_get_post_url, gitlab_get_project_memeber_role, shopping_get_latest_order_url,
    shopping_get_sku_latest_review_author, shopping_get_sku_latest_review_rating)}


def callable_helper(text: str) -> bool:
    """Whether a helper of that name takes that many arguments."""
    name, arguments = parse_helper(text) or ("", [])
    try:
        return (name in HELPERS and all(isinstance(argument, str) for argument in arguments)
                and bool(inspect.signature(HELPERS[name]).bind(None, *arguments)))
    except TypeError:
        return False


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


# ---- accounts and the server that resets
class Account(NamedTuple):
    user: str
    password: str
    form: str    # path of the login form
    inside: str  # path of a page that sends strangers to the form
    word: str    # on that page when logged in, if the form is at the same address


ACCOUNTS = {
    "shopping": Account("emma.lopez@gmail.com", "Password.123", "/customer/account/login/",
                        "/wishlist/", ""),
    "shopping_admin": Account("admin", "admin1234", "", "/dashboard", "Dashboard"),
    "reddit": Account("MarvelsGrantMan136", "test1234", "/login",
                      "/user/MarvelsGrantMan136/account", "Delete"),
    "gitlab": Account("byteblaze", "hello1234", "/users/sign_in", "/-/profile", ""),
}


def accounts_of(storage_state) -> list[str]:
    """Where a task starts logged in: "./.auth/gitlab.reddit_state.json" -> ["gitlab", "reddit"].

    [] where it names none of ours: it may be null, or a file that somebody wrote.
    """
    if not isinstance(storage_state, str):
        return []
    names = Path(storage_state).name.removesuffix("_state.json").split(".")
    return names if all(name in ACCOUNTS for name in names) else []


async def logged_in(browser_context, name: str, address: str) -> bool:
    """Whether the cookies of a browser context still open the site."""
    account = ACCOUNTS[name]
    response = await browser_context.request.get(address + account.inside)
    sent_away = account.form and account.form.rstrip("/") in urlsplit(response.url).path
    return response.ok and not sent_away and account.word in await response.text()


async def log_in(browser_context, name: str, address: str):
    """Fills in the form with a password field: labels and ids differ between versions."""
    account, page = ACCOUNTS[name], await browser_context.new_page()
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

        browser: a rollout.Browser. storage_state: the task's; if it names no account, it is yielded.
        """
        accounts = accounts_of(storage_state)
        if not accounts:
            yield storage_state
            return
        free = self.free.setdefault(".".join(accounts), [])
        state = free.pop() if free else None
        async with browser.launching:  # one login at a time spares the sites
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


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def reset(url: str, patience: float = 1800, pause: float = 1):
    """Asks WebArena's reset server for fresh sites; returns when they are up, after minutes."""
    url, until = url.rstrip("/"), time.monotonic() + patience
    try:
        status, text = get(f"{url}/reset")
        failed = status not in (200, 418)  # 418: a reset is already running
        while "Ready" not in text and not failed:
            status, text = get(f"{url}/status")
            failed = status >= 400 or time.monotonic() > until
            if "Ready" not in text and not failed:
                time.sleep(pause)  # containers are starting; nothing would notify us
    except OSError as error:
        raise ValueError(f"cannot reach the reset server {url} ({error}); start it, or drop "
                         "--reset-url.") from None
    if failed:
        raise ValueError(f"the reset at {url} failed: {status} {text.strip()[:99]}; look at its log.")
