"""WebArena from outside: its task files, WebRL's demonstrations on it, the addresses and accounts of its sites, their reset.

Task files are lists of objects in WebArena's schema; those of WebArena-Lite, VisualAgentBench's and the paper's authors'
differ in types here and there and are brought into one form. The sites run in containers of the user's, whose addresses are
in WebArena's variables (SHOPPING=http://127.0.0.1:7770 ...); the accounts are the benchmark's public ones. Logging in and
resetting were tried on stand-ins only: no container was at hand.
"""

import ast
import copy
import inspect
import re
import socket
import time
import urllib.error
import urllib.request
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

# The variable of each site, and the host that models know it by from WebArena's data.
HOSTS = {"SHOPPING": "onestopmarket.com", "SHOPPING_ADMIN": "luma.com/admin", "REDDIT": "reddit.com", "GITLAB": "gitlab.com",
         "MAP": "openstreetmap.org", "WIKIPEDIA": "wikipedia.org", "HOMEPAGE": "homepage.com"}

# ---- task files
# What evaluate.py has functions for.
CHECKS = ("exact_match", "must_include", "must_exclude", "one_of", "required_values")

PLACEHOLDER = re.compile(f"__({'|'.join([*HOSTS, 'MINIWOB'])})__")
REQUIRED = {"task_id": (int, str), "sites": (list,), "intent": (str,), "start_url": (str,), "eval": (dict,)}
EVAL_TYPES = ("string_match", "url_match", "program_html")
INEQUALITY = re.compile(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*")


def check_contents(contents, field: str):
    """Brings {check: references} into uniform types, in place. Yields (remark, whether it makes the row unusable)."""
    kinds = ", ".join(CHECKS)
    if isinstance(contents, dict):
        for key in [key for key, value in contents.items() if value is None]:
            del contents[key]
    if not isinstance(contents, dict) or not contents:
        yield f"{field} names nothing to check; give it one of {kinds} or fuzzy_match", True
        return
    for key, value in contents.items():
        name = f"{field}.{key}"
        if key not in CHECKS and key != "fuzzy_match":
            yield f"{name} is an unknown check; use one of {kinds} or fuzzy_match", True
        elif key == "exact_match":
            contents[key] = str(value)
            if not isinstance(value, (str, int, float)):
                yield f"{name} is {value!r:.60}; make it a string", True
        elif (key, value) != ("fuzzy_match", "N/A"):
            if isinstance(value, str) and value:  # looked through like a list, it would be a list of letters
                yield f"{name} is a bare string and was wrapped in a list", False
                value = [value]
            refs = [str(v) if isinstance(v, (int, float)) else v for v in value] if isinstance(value, list) else []
            contents[key] = refs
            if not refs or not all(isinstance(ref, str) and all(ref.split(" |OR| ")) for ref in refs):
                yield f"{name} is {value!r:.60}; make it a list of non-empty strings", True
            elif key == "required_values" and not all(map(INEQUALITY.fullmatch, " |OR| ".join(refs).split(" |OR| "))):
                yield f'{name} is {value!r:.60}; write an operator and a number, like "<= 700"', True


def check_target(target: dict, field: str):
    """A program_html target, like check_contents."""
    url, locator = target.get("url"), target.get("locator")
    if not isinstance(url, str) or not re.match(r"last$|func:|https?://|__[A-Z_]+__", url):
        yield f'{field}.url is {url!r:.60}; give a whole address, or "last" for where the episode ended', True
    prepared = target.get("prep_actions") or []
    if not isinstance(prepared, list) or not all(isinstance(action, str) for action in prepared):
        yield f"{field}.prep_actions is {prepared!r:.60}; make it a list of JavaScript calls", True
    if not isinstance(locator, str) or not re.match(r"\s*$|document\.|\[\.\.\.document\.|func:", locator):
        yield f'{field}.locator is {locator!r:.60}; use "" for the whole page, or JavaScript', True
    for key, call in (("url", url), ("locator", locator)):
        if isinstance(call, str) and call.startswith("func:"):
            # The shop's own interface is asked, so its address goes along.
            call = target[key] = re.sub(r"^func:(shopping_\w+)\((?!'__SHOPPING__')", r"func:\1('__SHOPPING__', ", call)
            if not callable_helper(call):
                yield f"{field} calls {call!r:.60}; write func:NAME('ARGUMENT', ...), NAME one of {', '.join(HELPERS)}", True
    yield from check_contents(target.get("required_contents"), f"{field}.required_contents")


def check_eval(spec: dict):
    """A task's "eval", like check_contents. What the eval_types do not use is not looked at."""
    types, targets = spec.get("eval_types"), spec.get("program_html")
    if not isinstance(types, list) or not types or not all(t in EVAL_TYPES for t in types):
        yield f"eval.eval_types is {types!r:.60}; make it a list of {', '.join(EVAL_TYPES)}", True
        return
    if "string_match" in types:
        yield from check_contents(spec.get("reference_answers"), "eval.reference_answers")
    if "url_match" in types:
        if not isinstance(spec.get("reference_url"), str) or not all(spec["reference_url"].split(" |OR| ")):
            yield "eval.reference_url is empty; give the URL that the episode must end on", True
        if spec.get("url_note") not in (None, "EXACT", "GOLD in PRED"):
            yield f'eval.url_note is {spec["url_note"]!r:.60}; use "EXACT" or "GOLD in PRED"', True
    if "program_html" in types:
        if not isinstance(targets, list) or not targets or not all(isinstance(target, dict) for target in targets):
            yield "eval.program_html is not a list of objects; give url, locator and required_contents of each page", True
            return
        for i, target in enumerate(targets):
            yield from check_target(target, f"eval.program_html[{i}]")


def check_row(row) -> tuple[dict, list[str], list[str]]:
    """A row -> (task in uniform types, remarks on what was mended, faults)."""
    if not isinstance(row, dict):
        return {}, [], [f"it is {type(row).__name__}; make it an object"]
    task, remarks, faults = copy.deepcopy(row), [], []
    for key, kinds in REQUIRED.items():
        if key not in task:
            faults.append(f"{key} is missing; add it")
        elif not isinstance(task[key], kinds) or task[key] in ("", []) or isinstance(task[key], bool):
            names = " or ".join(kind.__name__ for kind in kinds)
            faults.append(f"{key} is {task[key]!r:.60}; make it a non-empty {names}")
        elif key == "sites" and not all(isinstance(site, str) for site in task["sites"]):
            faults.append(f"sites is {task['sites']!r:.60}; make it a list of names")
    if isinstance(task.get("eval"), dict):
        for remark, broken in check_eval(task["eval"]):
            (faults if broken else remarks).append(remark)
    return task, remarks, faults


def answers_and_pages(task: dict) -> tuple[list[dict], list[dict]]:
    """([reference_answers] or [], the required_contents of every page), as far as the eval_types use them."""
    spec = task["eval"]
    return ([spec["reference_answers"]] if "string_match" in spec["eval_types"] else [],
            [page["required_contents"] for page in spec["program_html"]] if "program_html" in spec["eval_types"] else [])


def needs_judge(task: dict) -> bool:
    """Whether only a language model could judge it."""
    return any("fuzzy_match" in contents for contents in sum(answers_and_pages(task), []))


# ---- WebRL's demonstrations (web_policy_sft.json): one row a step, with the history before it as one flat text
ASKED = re.compile(r"Round \d+\n\n<\|eot_id\|><\|start_header_id\|>user<\|end_header_id\|>\n")
ANSWERED = "\n\n<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n"
BLOCKS = set("address article aside body dd div dl dt fieldset footer form header h1 h2 h3 h4 h5 h6 hr html iframe legend li main "
             "nav ol p pre section table tbody tfoot thead tr ul".split())


class Page(HTMLParser):
    """A page in WebRL's notation, <tag id="7" title="..." data-bbox="...">name</tag>, in the notation of rollout.OBSERVE."""

    def __init__(self, html: str):
        super().__init__()
        self.lines, self.open = [[]], []  # words by line; (tag, attributes, the lines outside) of what is open
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
            self.lines = [[]]  # what stands inside an element that can be used is its name

    def handle_data(self, data):
        if data.strip():
            self.end_input()
            self.lines[-1].append(escape(" ".join(data.split()), quote=False))

    def end_input(self):
        if self.open and self.open[-1][0] == "input":  # it may come without an end tag
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
        if tag == "input":
            tag = kind if kind in ("checkbox", "radio") else "button" if kind in ("submit", "button", "reset", "image") else tag
        said = {key: escape(value or "", quote=False) for key, value in attributes.items()}
        named = ("data-label", "placeholder", "title") if tag in ("input", "textarea", "select") else \
            ("data-text", "title", "value", "placeholder", "data-testid")
        name = ("" if tag == "select" else inside) or next((said[key] for key in named if said.get(key)), "")
        value = {"checkbox": {"checked": "on", "not-checked": "off"}.get(said.get("data-status"), ""),
                 "select": f"{said.get('data-text', '')} ({inside})", "input": said.get("data-value") or said.get("value", ""),
                 "textarea": said.get("data-value", "")}.get(tag, "")
        return f"<{tag}>{name} {said['id']}{value and ' = ' + value}</{tag}>"


def read_step(row: dict, where: str) -> tuple[str, tuple[str, ...], str, str]:
    """A row -> (intent, the responses before, the page, the response). Raises ValueError if it is in another format."""
    try:
        asked, answered = (turn["value"] for turn in row["conversations"])
        task, *rounds = ASKED.split(asked)
        rounds = [part.partition(ANSWERED) for part in rounds]
        if not task.startswith("Task Instruction: ") or not rounds or not all(mark for _, mark, _ in rounds):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{where}: not a step in WebRL's format.") from None
    return (task.removeprefix("Task Instruction: ").strip(), tuple(said.strip() for _, _, said in rounds[:-1]), rounds[-1][0],
            answered.strip())


def join_steps(steps: list[tuple]) -> list[dict]:
    """Steps -> trajectories, as in trajectories.jsonl. Where a step is missing, its turn has no page ("observation" None)."""
    records, starting = [], {}
    for intent, past, page, response in sorted(steps, key=lambda step: -len(step[1])):
        said = (*past, response)
        record = next((r for r in starting.get((intent, said), ()) if r["turns"][len(past)]["observation"] is None), None)
        if record is None:
            record = {"task_id": len(records), "sites": [], "intent": intent, "turns": [
                {"url": "", "observation": None, "response": text} for text in said]}
            records.append(record)
            for k in range(len(said)):
                starting.setdefault((intent, said[:k + 1]), []).append(record)
        record["turns"][len(past)]["observation"] = Page(page).text
    return records


# ---- sites
def site_urls(tasks: list[dict], sites: dict[str, str]) -> list[dict]:
    """The tasks with every placeholder (__SHOPPING__ ...) in start page and evaluators replaced by the address."""
    def fill(value, task):
        if isinstance(value, dict):
            return {key: fill(v, task) for key, v in value.items()}
        if isinstance(value, list):
            return [fill(v, task) for v in value]
        return PLACEHOLDER.sub(lambda m: address(m[1], task), value) if isinstance(value, str) else value

    def address(name, task):
        if not sites.get(name):
            raise ValueError(f"task {task['task_id']} uses the site __{name}__, but {name} is not set; "
                             f"export {name}=http://HOST:PORT, the address of your {name.lower()} site.")
        return sites[name].rstrip("/")

    return [task | {key: fill(task[key], task) for key in ("start_url", "eval")} for task in tasks]


def check_world(tasks: list[dict], sites: dict[str, str]):
    """Raises one sentence if a start page's server does not answer or a task cannot start logged in."""
    origins = {}
    for task in tasks:
        origins |= {urlsplit(url).netloc: (url, task) for url in task["start_url"].split(" |AND| ")}
        state = task.get("storage_state")
        accounts = accounts_of(state)
        if missing := [name.upper() for name in accounts if not sites.get(name.upper())]:
            raise ValueError(f"task {task['task_id']} starts logged in ({state}), but {missing[0]} is not set; export "
                             f"{missing[0]}=http://HOST:PORT.")
        if isinstance(state, str) and not accounts and not Path(state).exists():
            raise ValueError(f"task {task['task_id']} starts logged in through {state}, which does not exist; write it "
                             f"with Playwright, name it after {', '.join(ACCOUNTS)}, or set it to null.")
    for url, task in origins.values():
        parts = urlsplit(url)
        try:
            address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, timeout=10).close()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"cannot reach {url}, where task {task['task_id']} starts ({error}); start the site, or "
                             "correct its variable or start_url.") from None


# ---- the functions that a program_html target may name
def parse_helper(text: str) -> tuple[str, list] | None:
    """'func:name(__page__, "x")' -> (name, ["x"]); None if it is no such call. The page is handed over anyway."""
    found = re.fullmatch(r"func:(\w+)\((.*)\)\s*", text, re.DOTALL)
    try:
        return found and (found[1], ast.literal_eval(f"[{re.sub('__page__ *,? *', '', found[2])}]"))
    except (ValueError, TypeError, SyntaxError):
        return None


async def reddit_get_post_url(page, url: str) -> str:
    """The post that a comment's or an edit page's address belongs to."""
    parts = urlsplit(url)
    steps = parts.path.split("/")
    return f"{parts.scheme}://{parts.netloc}/f/{steps[2]}/{steps[3]}/" if len(steps) > 3 and steps[1] == "f" else url


async def gitlab_get_project_memeber_role(page, account: str) -> str:  # the misspelt name is the benchmark's
    return await page.evaluate("""account => {
        const names = [...document.querySelectorAll("td[data-label='Account'] span.gl-avatar-labeled-sublabel")];
        const row = names.findIndex(n => n.outerText === '@' + account);
        const role = document.querySelectorAll("td.col-max-role span")[row];
        return role ? role.outerText : ''; }""", account)


async def ask_shop(page, address: str, query: str) -> dict:
    """What the shop's own interface says to the benchmark's administrator."""
    admin = ACCOUNTS["shopping_admin"]
    token = await page.request.post(f"{address}/rest/default/V1/integration/admin/token",
                                    data={"username": admin.user, "password": admin.password})
    headers = {"Authorization": f"Bearer {await token.json()}"} if token.ok else {}
    reply = await page.request.get(f"{address}/rest/V1/{query}", headers=headers)
    if not reply.ok:
        raise ConnectionError(f"the shop {address} answered {reply.status} to {query[:60]}")
    return await reply.json()


async def shopping_get_latest_order_url(page, shop: str) -> str:
    newest = "searchCriteria[sortOrders][0][field]=created_at&searchCriteria[sortOrders][0][direction]=DESC"
    orders = await ask_shop(page, shop, f"orders?{newest}&searchCriteria[pageSize]=1")
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
        return name in HELPERS and bool(inspect.signature(HELPERS[name]).bind(None, *arguments))
    except TypeError:
        return False


async def call_helper(text: str, page, last_url: str) -> str:
    """What "func:name(...)" in a task says of the page. last_url: the address that the episode ended on."""
    name, arguments = parse_helper(text) or (text, [])
    if name not in HELPERS:
        raise ValueError(f"there is no helper {name}; see --validate.")
    arguments = [last_url if argument == "__last_url__" else argument for argument in arguments]
    try:
        return await HELPERS[name](page, *arguments)
    except (LookupError, TypeError, ValueError) as error:
        raise ConnectionError(f"{name} cannot read what the site answered ({error!r:.100})") from None


# ---- accounts and the server that resets
class Account(NamedTuple):
    user: str
    password: str
    form: str    # path of the login form
    inside: str  # path of a page that sends strangers to the form
    word: str    # which that page shows to whoever is logged in, where the form stands at the same address


ACCOUNTS = {
    "shopping": Account("emma.lopez@gmail.com", "Password.123", "/customer/account/login/", "/wishlist/", ""),
    "shopping_admin": Account("admin", "admin1234", "", "/dashboard", "Dashboard"),
    "reddit": Account("MarvelsGrantMan136", "test1234", "/login", "/user/MarvelsGrantMan136/account", "Delete"),
    "gitlab": Account("byteblaze", "hello1234", "/users/sign_in", "/-/profile", ""),
}


def accounts_of(storage_state) -> list[str]:
    """The sites that a task starts logged in to: "./.auth/gitlab.reddit_state.json" -> ["gitlab", "reddit"].

    [] where it names none of ours: it may be null, or a file that somebody wrote.
    """
    names = Path(storage_state).name.removesuffix("_state.json").split(".") if isinstance(storage_state, str) else []
    return names if all(name in ACCOUNTS for name in names) else []


async def logged_in(context, name: str, address: str) -> bool:
    """Whether the cookies of a browser context still open the site."""
    account = ACCOUNTS[name]
    response = await context.request.get(address + account.inside)
    sent_away = account.form and account.form.rstrip("/") in urlsplit(response.url).path
    return response.ok and not sent_away and account.word in await response.text()


async def log_in(context, name: str, address: str):
    """Fills in the form that holds a password field: labels and ids differ between versions of the same software."""
    account, page = ACCOUNTS[name], await context.new_page()
    await page.goto(address + account.form)
    form = page.locator("form:has(input[type=password]:visible)").first
    await form.locator("input:is([type=text], [type=email], :not([type])):visible").first.fill(account.user)
    await form.locator("input[type=password]:visible").first.fill(account.password)
    async with page.expect_navigation():
        await form.locator("input[type=password]:visible").first.press("Enter")
    await page.close()
    if not await logged_in(context, name, address):
        raise ConnectionError(f"logging in to {name} at {address} as {account.user} did not work")


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def reset(url: str, patience: float = 1800, pause: float = 1):
    """Asks WebArena's reset server for fresh sites and returns when they are up, which takes minutes."""
    url, until = url.rstrip("/"), time.monotonic() + patience
    try:
        status, text = get(f"{url}/reset")
        if status not in (200, 418):  # 418: one is under way already
            raise ValueError(f"the reset server {url} answered {status} ({text.strip()[:100]}); look at its log.")
        while "Ready" not in text:
            status, text = get(f"{url}/status")
            if status >= 400 or time.monotonic() > until:
                raise ValueError(f"the reset at {url} failed: {status} {text.strip()[:100]}; look at the server's log.")
            if "Ready" not in text:
                time.sleep(pause)  # containers start: there is nothing to be notified by
    except OSError as error:
        raise ValueError(f"cannot reach the reset server {url} ({error}); start it, or leave --reset-url out.") from None
