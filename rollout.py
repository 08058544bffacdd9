"""The agent in the browser: episodes, actions, pages, and the engine that decodes many episodes at once.

One turn:   observe -> page as text with element ids -> response -> parse -> execute -> settle

    - `ACTIONS` is the only list of actions for prompt, parser and executor; shorthands are in `parse` too.
    - assets/page.js writes observations. Their ids, and those in actions, are indices into an array of
      elements that the page holds. An id that a page merely prints means nothing.
    - The agent's mistakes are data: its next observation says what went wrong (`ActionError`). If the
      environment fails, the episode ends as "env_error" (`EnvError`), which is not a reward of 0.
    - No fixed sleeps except in Wait. `settle` waits for navigations and up to 3 s for what scripts began.
    - `Engine` decodes all episodes that wait for a response in one batch. It keeps the keys and values
      of each history between turns, so a turn prefills only what is new.

Words: a browser context is a private browser, with cookies and tabs of its own, inside one Chromium
process. A page is a tab; a frame is a document inside a page. An origin is scheme, host and port. A
storage state is saved cookies, hence a login. A slot is a worker's number, and its row in the KV cache.

Dimension key: B rows, T tokens, D width, V vocabulary.
"""
import ast
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import time
import uuid
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Awaitable, Callable
from urllib.parse import urlsplit

import torch
from playwright.async_api import Error as PlaywrightError, async_playwright

from compress import Chat, Trajectory, Turn, answer_of, context, fit_page, trunk
from model import GraphedStep, KVCache, Transformer, sample, unsharded

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in ("init.js", "page.js"))
CALL = "call => window['page.js'](call)"  # the scripts are in every page: sending them costs time
NUMBER = re.compile("[0-9]{1,6}")  # of an element or a tab


@dataclass
class Settings:
    """Knobs of a rollout; the scripts' Configs inherit them."""
    max_turns: int = 15            # responses per episode
    max_new_tokens: int = 1024     # tokens per response
    max_context: int = 16384       # tokens of history, page and response together
    concurrency: int = 16          # episodes at once on each rank, each in its own browser context
    timeout: float = 30.0          # seconds a page may take to load
    deterministic: bool = False    # play turns in lock-step: slower, but runs are equal bit for bit
    cuda_graph: bool = True        # on a GPU: decode with a CUDA graph instead of kernel by kernel
    text_only: bool = False        # load no images and fonts: lighter, but some layouts need them
    allow: str = ""                # more origins that pages may reach (http://host:port,...), or all
    viewport_only: bool = False    # show only the 1280 x 720 window instead of the whole page
    max_page_chars: int = 200_000  # a page's text is cut here before it is tokenized
    onlooker = None  # evaluate.Onlooker, called before each action. Without a type it is no flag

    def __post_init__(self):
        if self.max_new_tokens >= self.max_context:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} leaves no room for a page within "
                             f"--max-context {self.max_context}; make one smaller or the other larger.")


class ActionError(Exception):
    """The agent asked for something impossible; it reads this message."""


class EnvError(Exception):
    """The environment failed: site down, page crashed, browser gone. The episode is void."""


# -------------------------------------------------------------------------------------- Episodes --

# act(trajectory, slot) -> (action_ids, logps, ended): the last turn's response, by a model or an expert
Act = Callable[[Trajectory, int], Awaitable[tuple[list[int], list[float], bool]]]
# score(task, answer, page, why) -> reward; it appends the checks to `why`: evaluate.score
Score = Callable[..., Awaitable[float]]
# enter(browser, task): a block with the episode's storage state: evaluate.Environment.enter
Enter = Callable[["Browser", dict], contextlib.AbstractAsyncContextManager]


async def take_turns(session: "Session", chat: Chat, trajectory: Trajectory, slot: int, act: Act):
    """Observes and acts until the agent exits, uses up its turns, or fills the context."""
    settings, error = session.settings, ""
    budget = settings.max_context - settings.max_new_tokens
    hosts = trajectory.task.get("hosts", {})  # the name of a site in the prompt -> its address here
    while len(trajectory.turns) < settings.max_turns and trajectory.answer is None:
        url, page = await session.observe()
        page = f"error: {error}\n{page}" if error else page
        for host, address in hosts.items():
            page = page.replace(address, f"http://{host}")
        ids, shown, cut = fit_page(chat, trajectory, page, budget)
        if len(trunk(chat, trajectory, len(trajectory.turns))) + len(ids) > budget:
            return  # past responses alone fill the context: this is the end, as at the turn limit
        turn = Turn(url, shown, ids, [], [], "", page_cut=cut)
        trajectory.turns.append(turn)
        turn.action_ids, turn.logps, turn.ended = await act(trajectory, slot)
        turn.response = response = chat.decode(turn.action_ids)
        if settings.onlooker:
            await settings.onlooker(session, trajectory)
        for host, address in hosts.items():
            response = response.replace(f"http://{host}", address)
        error = ""
        try:
            call = parse(response)
            turn.action = str(call)
            if call.name == "exit":
                trajectory.answer = call.argument
            else:
                await session.execute(call)
        except ActionError as problem:
            turn.error = error = readable(problem)


async def episode(browser: "Browser", chat: Chat, task: dict, member: int, slot: int, act: Act,
                  score: Score) -> Trajectory:
    """Plays one task to its end and judges it once. Neither the world nor the agent makes it raise."""
    trajectory, timeout = Trajectory(task, member), browser.settings.timeout
    async with contextlib.AsyncExitStack() as stack:
        try:
            await browser.revive()
            state = await stack.enter_async_context(browser.enter(browser, task))
            session = await bounded(browser.open(task, state), 3 * timeout, "opening the start page")
            stack.push_async_callback(session.close)
            if "intent_from" in task:  # MiniWoB++: the page makes up its task
                intent = await session.ask(script=task["intent_from"])
                trajectory.task = task | {"intent": readable(intent)}
            await take_turns(session, chat, trajectory, slot, act)
            await session.observe()  # before we judge: lets the last action end, leaves a blocked page
            judging = score(trajectory.task, trajectory.answer, session.page, trajectory.checks)
            trajectory.reward = await bounded(judging, 10 * timeout, "judging the episode")
        except (EnvError, PlaywrightError, ConnectionError) as problem:
            trajectory.status, trajectory.reward = "env_error", 0.0
            trajectory.checks = [["environment", False, first_line(problem)]]
    return trajectory


async def play(tasks: list[dict], act: Act, chat: Chat, score: Score, settings: Settings, group: int = 1,
               log: Callable[[str], None] | None = None, enter: Enter | None = None) -> list[Trajectory]:
    """Plays every task `group` times, settings.concurrency at once. Ordered by task, then member."""
    if len(chat.head()) >= settings.max_context - settings.max_new_tokens:
        raise ValueError(f"--max-context {settings.max_context} leaves no room for a page: the system "
                         f"prompt has {len(chat.head())} tokens, a response {settings.max_new_tokens}.")
    jobs = list(enumerate((task, member) for task in tasks for member in range(group)))
    workers, done = min(settings.concurrency, len(jobs)), {}
    lock_step, queue = LockStep(workers, act), iter(jobs)
    policy = lock_step.act if settings.deterministic else act
    start = time.monotonic()

    async def work(slot):
        # Workers draw from one queue, but in deterministic runs a slot always plays the same episodes.
        for number, (task, member) in jobs[slot::workers] if settings.deterministic else queue:
            trajectory = await episode(browser, chat, task, member, slot, policy, score)
            if trajectory.status != "ok":  # once more, since most failures of the world pass
                fault = trajectory.checks[0][2]
                trajectory = await episode(browser, chat, task, member, slot, policy, score)
                trajectory.fault = fault
            done[number] = trajectory
            if log:  # evaluate.ticker, which shows some of these lines
                log(progress(list(done.values()), len(jobs), time.monotonic() - start))
        lock_step.update(left=1)

    async with Browser(settings, sites_of(tasks, settings.allow), enter) as browser:
        running = [asyncio.ensure_future(work(slot)) for slot in range(workers)]
        try:
            await asyncio.gather(*running)
        finally:
            for worker in running:
                worker.cancel()
    return [done[number] for number in range(len(jobs))]


class LockStep:
    """A barrier: nobody acts before all workers are ready, so every run decodes the same batches."""

    def __init__(self, workers: int, act: Act):
        self.workers, self.policy, self.ready, self.go = workers, act, 0, asyncio.Event()

    async def act(self, trajectory: Trajectory, slot: int):
        go, self.ready = self.go, self.ready + 1
        self.update()
        await go.wait()
        return await self.policy(trajectory, slot)

    def update(self, left: int = 0):  # left: workers that have played all their episodes
        self.workers -= left
        if self.ready == self.workers:
            self.go.set()
            self.ready, self.go = 0, asyncio.Event()


def progress(done: list[Trajectory], total: int, seconds: float) -> str:
    """One line: how far, how well, how fast, and how the world failed."""
    ok, turns = [tau for tau in done if tau.status == "ok"], sum(len(tau.turns) for tau in done)
    success, left = sum(tau.reward for tau in ok) / max(len(ok), 1), total / len(done) - 1
    faults = [tau.fault for tau in done] + [tau.checks[0][2] for tau in done if tau.status != "ok"]
    counts = Counter(fault.split(" at http")[0] for fault in faults if fault)
    return (f"{len(done)}/{total} episodes ({100 * len(done) // total}%), success {success:.0%}, "
            f"{turns / seconds:.1f} turns/s, {left * seconds:.0f} s left, env errors {len(done) - len(ok)}"
            + "".join(f"; {count} x {fault}" for fault, count in counts.most_common()))


# --------------------------------------------------------------------------------------- Actions --

@dataclass
class Call:
    """One parsed action. str() gives its canonical form."""
    name: str
    argument: str | None = None
    element: str | None = None

    def __str__(self):
        if self.name == "exit":
            return f"exit(message={self.argument!r})"
        pairs = [("action", self.name), ("argument", self.argument), ("element", self.element)]
        return "do(" + ", ".join(f"{key}={value!r}" for key, value in pairs if value is not None) + ")"


async def mouse(session: "Session", call: Call, does="click", **options):
    spot = await session.ask("locate", int(call.element))
    spot = spot if isinstance(spot, dict) else {}  # a hostile page may return anything
    if not all(isinstance(spot.get(key), (int, float)) for key in "xy"):
        raise ActionError(str(spot.get("error") or f"element {call.element} cannot be found"))
    hold = {"delay": 100} if does == "click" and spot.get("leaves") else {}  # ms, as people do
    await getattr(session.page.mouse, does)(spot["x"], spot["y"], **options, **hold)


async def type_text(session, call, enter=False):
    handle = await session.page.evaluate_handle(CALL, ["focus", int(call.element)])
    if not (field := handle.as_element()):
        raise ActionError(str(handle))  # the reason
    if await field.evaluate("field => field.isContentEditable"):  # rich editors follow the keys
        await session.page.keyboard.press("Backspace")  # `focus` has selected the text
        await session.page.keyboard.type(call.argument)
    else:
        await field.fill(call.argument, force=True)  # without waiting, since `focus` has checked
        await session.ask("typed", int(call.element), call.argument)
    if enter:
        await session.settle()  # scripts may answer what was typed before they expect Enter
        await session.page.keyboard.press("Enter")


async def select(session, call):
    if problem := await session.ask("select", int(call.element), call.argument):
        raise ActionError(f"cannot select {call.argument!r} in element {call.element}: {problem}")


async def go_back(session, call, step=-1):
    history = await session.devtools[session.page].send("Page.getNavigationHistory")
    entries, to = history["entries"], history["currentIndex"] + step
    if not 0 <= to < len(entries) or entries[to]["url"] == "about:blank":  # as each tab begins
        raise ActionError("there is no further page in the history")
    there, back = (session.page.go_back, session.page.go_forward)[::-step]
    try:
        await there(wait_until="commit", timeout=1000)  # `settle` waits for the rest
    except PlaywrightError as error:
        if "ERR_CACHE_MISS" in str(error):
            await session.settle()
            await back()
            raise ActionError("that page answered a form and cannot be shown again") from None


async def switch_tab(session, call):
    tabs = session.browser_context.pages
    if not NUMBER.fullmatch(call.argument.strip()) or int(call.argument) >= len(tabs):
        raise ActionError(f"there is no tab {call.argument}; tabs are 0 to {len(tabs) - 1}")
    session.page = tabs[int(call.argument)]
    await session.page.bring_to_front()


@dataclass(frozen=True)
class Action:
    help: str
    run: Callable[["Session", Call], Awaitable[None]] | None
    argument: str = ""     # an example for the prompt; "": the call takes no argument
    element: bool = False  # whether the call needs an element's id
    shorthand: str = ""    # how the call is written instead of do(action=...)


ACTIONS = {
    "Click": Action("click an element", mouse, element=True),
    "Right Click": Action("click with the right button", partial(mouse, button="right"), element=True),
    "Type": Action("replace a field's text", type_text, "text", element=True),
    "Search": Action("type into a field and press Enter", partial(type_text, enter=True), "text", True),
    "Select Dropdown Option": Action("choose an option of a dropdown by its text", select, "option", True),
    "Hover": Action("move the mouse over an element", partial(mouse, does="move"), element=True),
    "Scroll Up": Action("scroll up by two thirds of a screen", lambda s, call: s.ask("scroll", -1)),
    "Scroll Down": Action("scroll down by two thirds of a screen", lambda s, call: s.ask("scroll", 1)),
    "Press Enter": Action("press Enter in the field used last",
                          lambda s, call: s.page.keyboard.press("Enter")),
    "Switch Tab": Action("go to another tab, counted from 0", switch_tab, "0"),
    "Go Backward": Action("return to the previous page", go_back, shorthand="go_backward()"),
    "Go Forward": Action("undo a go_backward", partial(go_back, step=1), shorthand="go_forward()"),
    "Wait": Action("wait for one second", lambda s, call: s.page.wait_for_timeout(1000)),
    "exit": Action("end the task; the message is the answer, or empty", None,
                   shorthand='exit(message="...")'),
}


def signature(name: str) -> str:
    """The call as the prompt shows it."""
    action = ACTIONS[name]
    call = Call(name, action.argument or None, "12" if action.element else None)
    return action.shorthand or str(call).replace("'", '"')


def actions_help() -> str:
    """The action list of the system prompt."""
    return "\n".join(f"- {signature(name)}: {action.help}" for name, action in ACTIONS.items())


def read_call(text: str) -> tuple[str, dict[str, str], list[str]] | None:
    """'do("Click", element="12")' -> ("do", {"element": "12"}, ["Click"]); None if it is not one call."""
    def as_text(node):  # -3.50 stays as it was written
        value = ast.literal_eval(node)
        return value if isinstance(value, str) else ast.get_source_segment(text, node)

    with contextlib.suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        node = ast.parse(text[:8000], mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = {keyword.arg: as_text(keyword.value) for keyword in node.keywords}
            return node.func.id, arguments, [as_text(value) for value in node.args]


def parse(response: str) -> Call:
    """The one call in a response, between comment lines and code fences. Raises ActionError."""
    if (answer := answer_of(response)) is None:
        raise ActionError("the response was cut before </answer>")
    lines = re.split(r"\r\n?|\n", answer)
    while lines and not re.match(r"\s*(do|exit|go_backward|go_forward)\s*\(", lines[0]):
        lines.pop(0)
    if not lines:
        raise ActionError('no action found; write one call such as do(action="Click", element="12")')
    # A call may span lines, and so may a text inside it, whose lines may be empty or start with "#".
    written = lambda: read_call("\n".join(lines).strip()) or read_call("\\n".join(lines).strip())
    while not (read := written()) and len(lines) > 1 and re.match(r"\s*(#|```|$)", lines[-1]):
        lines.pop()
    if not read:
        raise ActionError(f"cannot read the action {lines[0].strip()[:80]!r}; write exactly one call a round")
    function, arguments, positional = read
    name = {"go_backward": "Go Backward", "go_forward": "Go Forward", "exit": "exit"}.get(function)
    name = name or arguments.pop("action", None) or (positional.pop(0) if positional else "")
    if name == "exit":
        return Call("exit", arguments.get("message", next(iter([*positional, *arguments.values()]), "")))
    if name not in ACTIONS:
        raise ActionError(f"unknown action {name!r}; use one of: {', '.join(ACTIONS)}")
    action, element = ACTIONS[name], arguments.get("element", "").strip("[]# ")
    if action.element and not NUMBER.fullmatch(element):
        raise ActionError(f"{name} needs the id of an element, as in {signature(name)}")
    if action.argument and "argument" not in arguments:
        raise ActionError(f"{name} needs an argument, as in {signature(name)}")
    argument = arguments["argument"] if action.argument else None
    return Call(name, argument, element if action.element else None)


# ----------------------------------------------------------------------------------- The browser --

def readable(text) -> str:
    """Text that UTF-8 can hold: a page's script may cut a surrogate pair in half."""
    return str(text).encode("utf-8", "replace").decode()


def first_line(error: Exception) -> str:
    line = readable(error).strip().split("\n")[0][:200]
    return "".join(c for c in line if c.isprintable())  # it is printed: no codes for the terminal


async def bounded(work: Awaitable, seconds: float, what: str):
    """Awaits work. Playwright bounds its own waiting, but a page's script may run forever."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise EnvError(f"{what} took more than {seconds:.0f} s") from None


def find_chromium(playwright, visible=False) -> str:
    """Playwright's own Chromium if it was downloaded, else one of the system. visible: has windows."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")[visible:]
    own = Path(playwright.chromium.executable_path)  # CACHE/chromium-1234/SYSTEM/chrome
    shells = [] if visible else own.parents[2].glob("chromium_headless_shell-*/*/*headless[-_]shell")
    for path in filter(os.path.exists, [*shells, own, *filter(None, map(shutil.which, names))]):
        return str(path)
    raise ValueError("no Chromium found: run `playwright install chromium`, or install a system one "
                     "(Debian: apt-get install chromium).")


# Chromium obeys only the last --disable-features, so this repeats those of Playwright's own that matter
# here. The last three replace frame or process at every navigation, for security that a fresh context
# gives anyway: without them a page costs about 40% less CPU (tests/bench.py).
FLAGS = ["--disable-dev-shm-usage", "--disable-gpu", "--num-raster-threads=1", "--disable-features="
         "HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,MediaRouter,PaintHolding,OptimizationHints,"
         "ThirdPartyStoragePartitioning,AvoidUnnecessaryBeforeUnloadCheckSync,"
         "DestroyProfileOnBrowserClose,NetworkTimeServiceQuerying,RenderDocument,"
         "ProactivelySwapBrowsingInstance,SpareRendererForSitePerProcess"]


def origin(url: str) -> str:
    """http://host:port of a web address; "" for anything else."""
    try:
        parts = urlsplit(url)
        host = parts.hostname.encode("idna").decode()  # as Chromium spells it
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError, AttributeError):  # no web address, or "http://host:PORT" in prose
        return ""
    host = f"[{host}]" if ":" in host else host
    return "" if "*" in host else f"{parts.scheme}://{host}:{port}"  # Chromium would take * for a pattern


def sites_of(tasks: list[dict], allow: str = "") -> set[str] | None:
    """The origins of all addresses in the tasks and in `allow`. None: no fence."""
    if allow == "all":
        return None
    # An address ends where JSON, a locator or a list (" |AND| ") goes on.
    found = re.findall(r"""(?i)https?://[^\s"'\\|,)]+""", json.dumps(tasks, ensure_ascii=False))
    return set(filter(None, map(origin, found + allow.split(","))))


class Browser:
    """One Chromium process. Every episode gets a fresh context (cookies, storage, world) in it.

    sites: the origins that pages can reach (None: all). The fence is Chromium's resolver, which knows no
    other host and port. So it holds for redirects, frames, sockets and scripts, and costs nothing.
    """

    def __init__(self, settings: Settings, sites: set[str] | None = None, enter: Enter | None = None):
        self.settings, self.sites = settings, sites
        self.enter = enter or (lambda browser, task: contextlib.nullcontext())
        self.launching = asyncio.Lock()

    async def __aenter__(self):
        async with contextlib.AsyncExitStack() as stack:  # stops Playwright if there is no Chromium
            self.playwright = await stack.enter_async_context(async_playwright())
            self.chromium = await self.launch()
            self.stack = stack.pop_all()
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(PlaywrightError, EnvError):  # it may have been killed
            await bounded(self.chromium.close(), self.settings.timeout, "closing Chromium")
        await self.stack.aclose()

    async def launch(self):
        flags = FLAGS + (["--no-sandbox"] if os.geteuid() == 0 else [])  # root cannot have a sandbox
        if self.settings.text_only:
            flags += ["--blink-settings=imagesEnabled=false", "--disable-remote-fonts"]
        if self.sites is not None:
            hosts = [urlsplit(site).netloc for site in sorted(self.sites)]
            rules = [f"MAP {host} {host}" for host in hosts] + ["MAP * ~NOTFOUND"]  # the first match counts
            flags.append("--host-resolver-rules=" + ", ".join(rules))
            flags.append("--force-webrtc-ip-handling-policy=disable_non_proxied_udp")  # asks no resolver
        visible = bool(self.settings.onlooker) and self.settings.onlooker.visible
        return await self.playwright.chromium.launch(
            executable_path=find_chromium(self.playwright, visible), args=flags, headless=not visible)

    async def revive(self):
        """Starts Chromium again after a crash. The episodes that were in it are environment errors."""
        if not self.chromium.is_connected():  # ask without the lock first: logins hold it for long
            async with self.launching:
                if not self.chromium.is_connected():
                    self.chromium = await self.launch()

    async def open(self, task: dict, state: dict | str | None = None) -> "Session":
        """Starts an episode in its own context and, if the task names a world, in its own world."""
        # The world travels in a header, not in a cookie, so that logging out does not change it.
        headers = {"X-World": f"{task['world']}-{uuid.uuid4().hex}"} if "world" in task else {}
        browser_context = await self.chromium.new_context(
            viewport={"width": 1280, "height": 720}, extra_http_headers=headers, accept_downloads=False,
            storage_state=state or task.get("storage_state"), service_workers="block")
        browser_context.set_default_timeout(1000 * self.settings.timeout)
        session = Session(browser_context, self.settings, self.sites)
        async with contextlib.AsyncExitStack() as stack:  # closes the session if a start page fails
            stack.push_async_callback(session.close)
            await browser_context.add_init_script(SCRIPTS)
            for url in task["start_url"].split(" |AND| "):
                await session.start(url)
            session.page = next(iter(browser_context.pages), session.page)  # the first start page
            await session.page.bring_to_front()
            stack.pop_all()
        return session


class Session:
    """One episode's view of the web: its tabs, and what is loading in them."""

    def __init__(self, browser_context, settings: Settings, sites: set[str] | None):
        self.browser_context, self.settings, self.sites = browser_context, settings, sites
        self.page = None               # the current tab
        self.devtools: dict = {}       # each tab's connection to Chromium's own protocol
        self.notes: list[str] = []     # dialogs and the like, for the next observation
        self.refused = ""              # an address outside the fence that the page tried to open
        self.opening: deque = deque()  # addresses of tabs that are announced but not here yet
        self.loading: set = set()      # frames that are navigating, and new tabs
        self.quiet = asyncio.Event()   # set while `opening` and `loading` are empty
        browser_context.on("page", self._adopt)
        browser_context.on("requestfailed", self._failed)

    async def start(self, url: str):
        """Opens a start page in a tab of its own."""
        self._opens("about:blank")
        await self.browser_context.new_page()
        await self.quiet.wait()  # until `_adopt` has it
        answer = await self.page.goto(url, wait_until="commit")
        await self.settle()  # an image that never comes must not keep the agent from the page
        if answer and answer.status >= 500:  # on later pages the agent may have caused it and reads it
            raise EnvError(f"the start page answered {answer.status}")

    async def observe(self) -> tuple[str, str]:
        """(url, simplified HTML) of the current page. Raises EnvError."""
        settings = self.settings
        for attempt in range(3):  # a page may navigate by itself between two messages
            await self.settle()
            if self.page.url.startswith("chrome-error:"):
                if not self.refused:
                    raise EnvError("the site did not answer")
                await self._leave_error_page()
                continue
            try:
                for tab in self.browser_context.pages[1:-7]:
                    self.notes.append("an old tab was closed: there may be eight, the first and the newest")
                    await tab.close()
                text = await self.ask("observe", settings.viewport_only, settings.max_page_chars)
                return self.page.url, readable(f"{self._take_notes()}{text}")
            except PlaywrightError as error:
                if "ontext was destroyed" not in str(error):
                    raise EnvError(first_line(error)) from None
        raise EnvError("the page navigates away whenever it is opened")

    async def ask(self, *call, script=CALL):
        """Calls a function of page.js: ask("scroll", 1). A hostile page can change what it returns."""
        try:
            return await bounded(self.page.evaluate(script, call), self.settings.timeout, "reading the page")
        except (ValueError, TypeError, KeyError) as error:  # Playwright cannot decode the result
            raise EnvError(f"the page garbles what is read of it ({first_line(error)})") from None

    async def execute(self, call: Call):
        """Carries out an action. Raises ActionError with the sentence for the agent."""
        timeout = self.settings.timeout
        try:
            await asyncio.wait_for(ACTIONS[call.name].run(self, call), timeout)
        except asyncio.TimeoutError:  # a script may be in a loop; the next observation will tell
            raise ActionError(f"the page did not react to {call.name} within {timeout:.0f} s") from None
        except PlaywrightError as error:  # here Playwright's errors become the agent's
            raise ActionError(f"{call.name} failed: {first_line(error).split('Error: ', 1)[-1]}") from None

    async def settle(self):
        """Waits for the navigations under way. Stops one that takes too long and tells the agent."""
        timeout, end, files = self.settings.timeout, time.monotonic() + 3, None
        try:
            with contextlib.suppress(PlaywrightError, KeyError):  # the page may navigate away meanwhile
                while (left := end - time.monotonic()) > 0 and await self.ask("settled", files, 1000 * left):
                    tree = self.devtools[self.page].send("Page.getResourceTree")
                    files = (await bounded(tree, timeout, "loading"))["frameTree"]["resources"]
            await bounded(self.quiet.wait(), timeout, "loading")
        except EnvError:
            self.notes.append(f"the page did not finish loading within {timeout:.0f} s and was stopped")
            with contextlib.suppress(PlaywrightError, EnvError):  # a page may not react to this either
                if self.page in self.devtools:  # a tab that is still opening has no connection yet
                    await bounded(self.devtools[self.page].send("Page.stopLoading"), 1, "stopping")
                if self.page.url in ("", "about:blank") and len(self.browser_context.pages) > 1:
                    await bounded(self.page.close(), 1, "closing")
            self._stop_waiting()

    async def close(self):
        with contextlib.suppress(PlaywrightError, EnvError):
            await bounded(self.browser_context.close(), self.settings.timeout, "closing")

    def _take_notes(self) -> str:
        notes, self.notes, tabs = Counter(self.notes).most_common(), [], self.browser_context.pages
        notes[8:] = [(f"{len(notes) - 8} more notes like these", 1)] if len(notes) > 8 else []
        text = "".join(f"note: {note}{f' ({n} times)' * (n > 1)}\n" for note, n in notes)
        if len(tabs) > 1 and self.page in tabs:
            text += f"note: this is tab {tabs.index(self.page)} of {len(tabs)}, counted from 0\n"
        return text

    async def _adopt(self, page):
        """Makes a new tab the current one and listens to it."""
        self.page = page
        page.on("dialog", self._answer)
        page.on("crash", self._stop_waiting)
        page.on("close", self._closed)
        page.on("download", lambda _: self.notes.append("a file was offered for download and not kept"))
        with contextlib.suppress(PlaywrightError):  # it may close at any time
            devtools = self.devtools[page] = await self.browser_context.new_cdp_session(page)
            # The page's process announces a navigation before it answers our next message. So once
            # `settle` has an answer, it knows whether an action started a navigation: no polling.
            devtools.on("Page.frameRequestedNavigation",
                        lambda e: self._loads(e["frameId"], e["disposition"] == "currentTab"))
            for event, starts in ("StartedLoading", True), ("StoppedLoading", False), ("Detached", False):
                devtools.on(f"Page.frame{event}", lambda e, starts=starts: self._loads(e["frameId"], starts))
            devtools.on("Page.windowOpen", lambda e: self._opens(e["url"]))
            await devtools.send("Page.enable")
            if self.opening:
                url = self.opening.popleft()
                self._loads(page, True)
                if url not in ("", "about:blank"):  # a tab begins empty, which counts as loaded
                    await page.wait_for_url(lambda now: now != "about:blank", wait_until="commit")
                await page.wait_for_load_state("domcontentloaded")
        self._loads(page, False)
        if page.is_closed():  # before we listened
            self._closed(page)

    def _loads(self, frame, started: bool):
        (self.loading.add if started else self.loading.discard)(frame)
        (self.quiet.clear if self.loading or self.opening else self.quiet.set)()

    def _opens(self, url: str):
        self.opening.append(url)
        self.quiet.clear()

    def _stop_waiting(self, *_):
        self.loading.clear()
        self.opening.clear()
        self.quiet.set()

    def _closed(self, page):
        if page is self.page and self.browser_context.pages:
            self.page = self.browser_context.pages[-1]
        self._stop_waiting()

    def _failed(self, request):
        outside = self.sites is not None and origin(request.url) not in self.sites
        if request.is_navigation_request() and outside:
            with contextlib.suppress(PlaywrightError):  # a tab that is still opening has no frame yet
                if request.frame.parent_frame:  # the page around it stays
                    return
            self.refused = request.url

    async def _leave_error_page(self):  # to the page before it, or to the tab before it
        self.notes.append(f"{self.refused[:200]} is not one of the task's sites and was not opened")
        self.refused = ""
        if not await self.ask(script="history.length > 1") and len(self.browser_context.pages) > 1:
            await self.page.close()
        else:
            await self.page.go_back()

    async def _answer(self, dialog):
        message = " ".join(dialog.message[:200].split()).replace("<", "&lt;").replace(">", "&gt;")
        self.notes.append(f"the page showed a {dialog.type}: {message}")
        with contextlib.suppress(PlaywrightError):  # its tab may have closed
            await dialog.accept(dialog.default_value)


# ------------------------------------------------------------------------------------ The engine --

@dataclass
class Request:
    slot: int
    ids: list[int]      # the whole context
    rng: random.Random  # this episode's own
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    out: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class Engine:
    """Continuous batching: prefill new requests, decode one token for all running ones, repeat.

    Each worker owns a cache slot. A new turn's context shares its history, up to the last page, with the
    ids that the slot holds: the slot rolls back to the end of the common part and prefills the rest.
    """

    def __init__(self, model: Transformer, chat: Chat, settings: Settings, temperature=1.0):
        weight = model.model.embed_tokens.weight
        self.model, self.chat, self.device = model, chat, weight.device
        self.temperature, self.max_new_tokens = temperature, settings.max_new_tokens
        slots, length = settings.concurrency, settings.max_context + 1
        self.cache = KVCache(model.config, slots, length, weight.dtype, weight.device)
        use_graph = settings.cuda_graph and weight.device.type == "cuda"
        self.graphed = GraphedStep(model, self.cache) if use_graph else None
        self.held: list[list[int]] = [[] for _ in range(slots)]  # ids whose keys and values it holds
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.arrived = asyncio.Event()

    async def respond(self, ids: list[int], slot: int, rng: random.Random):
        """Samples a response to the context `ids` -> (ids, logps, whether it ended by itself)."""
        request = Request(slot, ids, rng)
        self.waiting.append(request)
        self.arrived.set()
        await request.complete.wait()
        return request.out, request.logps, request.out[-1:] == [self.chat.end_id]

    async def serve(self):
        """Runs until cancelled. Forward passes run in a thread, so no browser waits for them."""
        # A new thread would compute on the first GPU. A single thread keeps one cuBLAS workspace.
        init = (torch.cuda.set_device, (self.device,)) if self.device.type == "cuda" else (None, ())
        # Leaving this block waits for the pass under way. After that, weights may be sharded again.
        with ThreadPoolExecutor(1, "forward", *init) as thread:
            in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
            while True:
                if not self.waiting and not self.running:
                    self.arrived.clear()
                    await self.arrived.wait()
                while self.waiting:
                    await in_thread(self.prefill, self.waiting[0])
                    self.running.append(self.waiting.popleft())
                for request in await in_thread(self.decode):
                    self.running.remove(request)
                    request.complete.set()

    @torch.no_grad()  # holds for one thread only, so it is set in the thread that computes
    def prefill(self, request: Request, chunk: int = 2048):
        """Brings the slot to hold all of the context but its last token, which `decode` feeds."""
        slot, ids = request.slot, request.ids
        same = len(os.path.commonprefix([self.held[slot], ids]))
        for start in range(min(same, len(ids) - 1), len(ids) - 1, chunk):
            part = torch.tensor([ids[start:min(start + chunk, len(ids) - 1)]], device=self.device)
            positions = torch.arange(start, start + part.shape[1], device=self.device)[None]
            self.model(part, positions, self.cache, slice(slot, slot + 1), head=lambda x_BTD: x_BTD[:, :0])
        self.held[slot] = ids[:-1]

    @torch.no_grad()
    def decode(self) -> list[Request]:
        """One token for every running request; returns those that are complete."""
        # Neighboring slots are a view of the cache. Idle slots among them write one unused position.
        slots = range(self.cache.slots) if self.graphed else [r.slot for r in self.running]
        low, rows = min(slots), slice(min(slots), max(slots) + 1)
        tokens, uniform = [[0]] * (rows.stop - low), [0.0] * (rows.stop - low)
        for r in self.running:
            tokens[r.slot - low] = [r.out[-1] if r.out else r.ids[-1]]
            uniform[r.slot - low] = r.rng.random()
        positions = [[len(held)] for held in self.held[rows]]
        tokens_B1, positions_B1 = (torch.tensor(x, device=self.device) for x in (tokens, positions))
        if self.graphed:
            logits_BV = self.graphed(tokens_B1, positions_B1, max(positions)[0])
        else:
            logits_BV = self.model(tokens_B1, positions_B1, self.cache, rows,
                                   head=lambda x_BTD: self.model.logits(x_BTD[:, -1]))
        uniform_B = torch.tensor(uniform, dtype=torch.float64, device=self.device)
        ids_B, logp_B = sample(logits_BV, uniform_B, self.temperature)
        ids, logps = ids_B.tolist(), logp_B.tolist()
        for r in self.running:
            self.held[r.slot] += tokens[r.slot - low]
            r.out.append(ids[r.slot - low])
            r.logps.append(logps[r.slot - low])
        ended = lambda r: r.out[-1] == self.chat.end_id or len(r.out) == self.max_new_tokens
        return list(filter(ended, self.running))


async def rollout(model: Transformer, chat: Chat, tasks: list[dict], score: Score, settings: Settings, *,
                  group: int = 1, seed: int | str = 0, temperature: float = 1.0, choose=None,  # forks/tsr.py
                  log: Callable[[str], None] | None = None, enter: Enter | None = None) -> list[Trajectory]:
    """`play` with the model as policy. Random numbers depend only on (seed, task, member)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # the browser needs the others
    with unsharded(model) as whole:
        slots = min(settings.concurrency, len(tasks) * group)  # each takes gigabytes of cache
        engine = Engine(whole, chat, replace(settings, concurrency=slots), temperature)
        rngs: dict[int, random.Random] = {}

        async def act(trajectory: Trajectory, slot: int):
            if (turns := len(trajectory.turns)) == 1:
                rngs[slot] = random.Random(f"{seed}/{trajectory.task['task_id']}/{trajectory.member}")
            draw = partial(engine.respond, context(chat, trajectory, turns - 1), slot, rngs[slot])
            return await (choose(trajectory, draw) if choose else draw())

        playing = play(tasks, act, chat, score, settings, group, log, enter)
        work = [asyncio.ensure_future(playing), asyncio.ensure_future(engine.serve())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()  # the engine ends only by raising
        finally:
            for task in work:
                task.cancel()
            await asyncio.wait(work)
            engine.cache = engine.graphed = None  # frees memory even if something still holds the engine
            torch.set_num_threads(threads)
