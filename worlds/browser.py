"""Chromium, as an agent sees and uses it: a page becomes text, an element's id becomes a click.

    async with Browser(settings, sites_of(tasks)) as browser:
        session = await browser.open(task)
        url, text = await session.observe()
        await session.execute("Click", Session.click, 12)

    - worlds/page/ writes observations. Their ids, and those in actions, are indices into an array of
      elements that the page holds. An id that a page merely prints means nothing.
    - The agent's mistakes are data: its next observation says what went wrong (`ActionError`). If the
      environment fails, the episode is void (`EnvError`), which is not a reward of 0.
    - Nothing sleeps to give a page time, except `Session.wait`, which the agent asks for, and a click that leaves
      a field (0.1 s). `settle` waits for navigations, and up to 3 s for what scripts have begun.
    - Pages are hostile. Whatever one does, the agent reads a sentence or the episode is void; the
      run goes on. And nothing reaches a host that is not the task's: see `fence`.

Words: a browser context is a private browser, with cookies and tabs of its own, inside one Chromium
process. A page is a tab; a frame is a document inside a page. An origin is scheme, host and port. A
storage state is saved cookies, hence a login. Devtools is Chromium's own protocol (CDP), below Playwright's.
"""
import asyncio
import contextlib
import json
import math
import os
import posixpath
import random
import re
import shutil
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Awaitable
from urllib.parse import unquote, urlsplit

from playwright.async_api import Error as PlaywrightError, async_playwright


@dataclass
class BrowserSettings:
    """Knobs of the browser; rollout.Settings inherits them."""
    timeout: float = 30.0          # seconds a page may take to load
    text_only: bool = False        # load no images and fonts: lighter, but some layouts need them
    allow: str = ""                # more origins that pages may reach (http://host:port,...), or all
    viewport_only: bool = False    # show only the 1280 x 720 window instead of the whole page
    max_page_chars: int = 200_000  # a page's text is cut here before it is tokenized
    browser: str = ""              # Chromium elsewhere: ws://HOST:PORT of a Playwright server

    def __post_init__(self):
        if not 0 < self.timeout <= 1e6:  # Chromium takes a much longer one for none at all
            raise ValueError(f"--timeout {self.timeout:g}: give the seconds that a page may take, from above 0 to 1e6.")
        if self.browser and not re.match(r"wss?://[^/\s]+", self.browser):
            raise ValueError(f"--browser {self.browser}: write ws://HOST:PORT, the address that "
                             "`playwright run-server` prints.")


# ------------------------------------------------------------------------------- when things fail --


def readable(text) -> str:
    """Text that UTF-8 can hold: a page's script may cut a surrogate pair in half."""
    return str(text).encode("utf-8", "replace").decode()


def first_line(error: Exception) -> str:
    line = readable(error).strip().split("\n")[0][:200]
    return "".join(c for c in line if c.isprintable())  # it is printed: no codes for the terminal


class ActionError(Exception):
    """The agent asked for something impossible; it reads this message."""

    def __init__(self, message):
        super().__init__(readable(message))  # it may quote a page


class EnvError(Exception):
    """The environment failed: site down, page crashed, browser gone. The episode is void."""


class TookTooLong(EnvError):
    """Something took longer than it was allowed."""


# What an episode raises when the environment is to blame.
ENV_FAILED = (EnvError, PlaywrightError, ConnectionError)


async def bounded(work: Awaitable, seconds: float, what: str):
    """Awaits work for so many seconds; raises TookTooLong, with `what` in its sentence.

    Playwright bounds its own waiting, but a page's script may run forever.
    """
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise TookTooLong(f"{what} took more than {seconds:.0f} s") from None


# -------------------------------------------------------------------------------------- Chromium --


def find_chromium(playwright, visible=False) -> str:
    """The path of Playwright's own Chromium if it was downloaded, else of a system-wide one.

    visible: one that has windows. Otherwise the headless shell goes first: it starts faster.
    """
    own = Path(playwright.chromium.executable_path)  # CACHE/chromium-1234/SYSTEM/chrome
    candidates = [own]
    names = ["chromium", "chromium-browser", "google-chrome"]
    if not visible:
        shells = own.parents[2].glob("chromium_headless_shell-*/*/*headless[-_]shell")
        candidates = [*shells, own]
        names.insert(0, "chromium-headless-shell")
    for name in names:
        found = shutil.which(name)
        if found:
            candidates.append(found)

    for path in candidates:
        if os.path.exists(path):
            return str(path)
    raise ValueError("no Chromium found: run `playwright install chromium`, or install a system one "
                     "(Debian: apt-get install chromium).")


# Chromium honours only the last --disable-features, so we repeat Playwright's list as far as it
# matters here. The last three replace frame or process at every navigation, for security that a fresh
# context gives anyway: without them a page costs about 40% less CPU (tests/tools/bench.py).
DISABLED = ["HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "MediaRouter", "PaintHolding",
            "OptimizationHints", "ThirdPartyStoragePartitioning",
            "AvoidUnnecessaryBeforeUnloadCheckSync", "DestroyProfileOnBrowserClose",
            "NetworkTimeServiceQuerying",
            "RenderDocument", "ProactivelySwapBrowsingInstance", "SpareRendererForSitePerProcess"]
FLAGS = ["--disable-dev-shm-usage", "--disable-gpu", "--num-raster-threads=1",
         "--disable-features=" + ",".join(DISABLED)]


# ------------------------------------------------------------------------------------- the fence --

# An address in a task ends where JSON, a locator or a list (" |AND| ") goes on.
ADDRESS = re.compile(r"""https?://[^\s"'\\|,)]+""", re.IGNORECASE)

# Chromium learns when it starts what it may reach, and its rules know no ranges of ports. So the servers
# that serve.py starts later share these ports, "{port}" in a task. They lie below the ports that systems
# give to outgoing connections, and differ from process to process, because several runs may share a machine.
SERVED_PORTS = random.SystemRandom().sample(range(16_000, 32_000), 256)


def origin(url: str) -> str:
    """http://host:port of a web address; "" for anything else."""
    try:
        parts = urlsplit(url)
        host = parts.hostname.encode("idna").decode()  # as Chromium spells it
        default_port = {"http": 80, "https": 443}[parts.scheme]
        port = parts.port or default_port
    except (ValueError, KeyError, AttributeError):  # no web address, or "http://host:PORT" in prose
        return ""
    # The fence would take a star for a pattern.
    if "*" in host:
        return ""
    if ":" in host:
        host = f"[{host}]"
    return f"{parts.scheme}://{host}:{port}"


def start_pages(task: dict) -> list[str]:
    """The addresses that a task starts at, each in a tab of its own."""
    return task["start_url"].split(" |AND| ")


def part_with_addresses(task: dict):
    """The part of a task whose addresses the agent may need."""
    if "serve" in task:  # it has one site; an address in its intent is something to type
        return [task["start_url"], task.get("eval")]
    return task


def sites_of(tasks: list[dict], allow: str = "") -> set[str] | None:
    """The origins of all addresses in the tasks and in `allow`. None: no fence."""
    if allow == "all":
        return None
    # 1) The addresses.
    parts = [part_with_addresses(task) for task in tasks]
    text = json.dumps(parts, ensure_ascii=False)
    addresses = ADDRESS.findall(text)
    for address in filter(None, allow.split(",")):
        if not origin(address.replace("{port}", "80")):
            raise ValueError(f"--allow {address}: write http://HOST or http://HOST:PORT.")
        addresses.append(address)

    # 2) Their origins; of one with {port}, those with each port that a server may get.
    sites = set()
    before_port = set()  # such as http://127.0.0.1:
    for address in addresses:
        sites.add(origin(address))
        begin, placeholder, _ = address.partition("{port}")
        if placeholder:
            before_port.add(begin)
    for begin in before_port:
        for port in SERVED_PORTS:
            sites.add(origin(f"{begin}{port}"))
    sites.discard("")  # of what is no web address
    return sites


def inside(url: str, private: list[str]) -> bool:
    """Whether an address lies under one of the paths. Read leniently: percent-decoded once, in lower case."""
    path = unquote(urlsplit(url).path)
    path = posixpath.normpath("/" + path.lstrip("/"))  # without //, /./ and /../
    path = path.lower() + "/"
    for prefix in private:
        folder = prefix.lower().rstrip("/") + "/"
        if path.startswith(folder):
            return True
    return False


WEBRTC = "--force-webrtc-ip-handling-policy=disable_non_proxied_udp"


def fence(sites: set[str]) -> list[str]:
    """Flags for a Chromium that reaches these origins only.

    Its resolver knows no other host and port. So the fence holds for redirects, frames, sockets and
    scripts, and costs nothing.
    """
    rules = []
    for site in sorted(sites):
        host = urlsplit(site).netloc
        rules.append(f"MAP {host} {host}")
    rules.append("MAP * ^NOTFOUND")  # the first rule that matches counts; no name has a "^"
    # Calls between browsers (WebRTC) send UDP to bare addresses, without asking the resolver.
    return ["--host-resolver-rules=" + ", ".join(rules), WEBRTC]


# ------------------------------------------------------------------------------ Chromium elsewhere --
#
#     there   python -m playwright run-server --host 127.0.0.1 --port 9000 --unsafe
#     here    ssh -N -L 9000:127.0.0.1:9000 there
#             python evaluate.py --browser ws://127.0.0.1:9000 ...
#             --browser ws://127.0.0.1:9000#/usr/bin/chromium      if Playwright has no Chromium there
#
# Chromium's memory is then another machine's, while its pages' network stays this machine's: whatever
# pages request comes here through the connection and goes out from here (Playwright's expose_network),
# so 127.0.0.1 in a task is this machine. Only requests to the task's sites go out. That is the fence: it
# stands here, where no page can change it. Two flags stop what would not come this way.
#
# --unsafe lets clients choose Chromium's flags, and even another program: whoever reaches that port can
# run programs there. So keep it on loopback, behind ssh. Both machines need the same Playwright.

# These stop all name lookups (except of 127.0.0.1, where Chromium talks to Playwright) and WebRTC's calls.
KEEP_IN = ["--host-resolver-rules=MAP * ^NOTFOUND, EXCLUDE 127.0.0.1", WEBRTC]


async def connect(playwright, settings: BrowserSettings, flags: list[str], sites: set[str] | None):
    """Chromium on the machine that settings.browser names.

    Raises EnvError; ValueError if it does not take the flags that keep pages in.
    """
    if sites is None:
        exposed = "*"
    else:
        hosts = [urlsplit(site).netloc for site in sorted(sites)]
        exposed = ",".join(hosts).replace("[", "").replace("]", "")  # Playwright's [::1]:80 is ::1:80
        flags = [*flags, *KEEP_IN]
    address, _, program = settings.browser.partition("#")
    # Only with --enable-automation does Chromium tell its flags, which `require_flags` compares.
    options = {"args": [*flags, "--enable-automation"], "headless": True}
    if program:
        options["executablePath"] = program
    # The first header makes the server send us all requests; without it, those that expose_network
    # does not name would go out there.
    headers = {"x-playwright-proxy": "*", "x-playwright-launch-options": json.dumps(options)}
    try:
        chromium = await playwright.chromium.connect(address, headers=headers, expose_network=exposed,
                                                     timeout=1000 * settings.timeout)
    except PlaywrightError as error:
        raise EnvError(f"--browser {address}: {why_not(error)}") from None
    if sites is not None:
        await require_flags(chromium, flags, address)
    return chromium


async def require_flags(chromium, flags: list[str], address: str):
    """Raises ValueError, and disconnects, if Chromium runs without these flags."""
    taken = []
    try:
        devtools = await chromium.new_browser_cdp_session()
        answer = await devtools.send("Browser.getBrowserCommandLine")
        taken = answer["arguments"]
    except PlaywrightError as error:
        without_ours = "--enable-automation" in str(error)  # it did not take that one either, so `taken` stays empty
        if not without_ours:
            raise EnvError(f"--browser {address}: {first_line(error)}") from None
    if not set(flags) <= set(taken):
        await chromium.close()
        raise ValueError(f"--browser {address}: the server did not take our flags, so pages could reach "
                         "more than the task's sites; start it with --unsafe, or add --allow all.")


def why_not(error: PlaywrightError) -> str:
    """Why there is no connection, and the remedy."""
    there = re.search(r"server version: v?([\w.]+)", str(error))
    here = re.search(r"client version: v?([\w.]+)", str(error))
    if there and here:
        return (f"Playwright is {there[1]} there and {here[1]} here; install the same version on both "
                "machines.")
    if "Executable doesn't exist" in str(error):
        return "Playwright has no Chromium there; run `playwright install chromium` there."
    return f"{first_line(error)}; start `playwright run-server` there, and check host and port."


# ----------------------------------------------------------------------------------- the browser --


def read_script(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def page_scripts() -> str:
    """What runs in every document: init.js, and a function of the window that CALL calls.

    The other files of worlds/page/ share the scope of that function, basics.js first. A page sees none of it.
    """
    names = ("basics", "seen", "usable", "names", "values", "text", "actions")
    shared = "\n".join(read_script(f"page/{name}.js") for name in names)
    function = f"(() => {{\n{shared}\nreturn call;\n}})()"
    return read_script("page/init.js") + f"\nObject.defineProperty(window, 'worlds/page', {{value: {function}}});"


SCRIPTS = page_scripts()  # installed once: sending them with every call would take 2 ms a turn
CALL = "call => window['worlds/page'](call)"  # call: [name of a function in page/actions.js, its arguments ...]


class Browser:
    """One Chromium process. Every episode gets a fresh context (cookies, storage, world) in it.

    sites: the origins that pages can reach (None: all). visible: in a window, for people to watch.
    """

    def __init__(self, settings: BrowserSettings, sites: set[str] | None = None, visible=False):
        self.settings = settings
        self.sites = sites
        self.visible = visible
        self.stopped = set()  # the origins that pages asked for in vain, because of the fence
        self.one_at_a_time = asyncio.Lock()  # starting Chromium again, and each login (webarena.Logins)

    async def __aenter__(self):
        async with contextlib.AsyncExitStack() as stack:  # stops Playwright if there is no Chromium
            self.playwright = await stack.enter_async_context(async_playwright())
            try:
                self.chromium = await self.launch()
            except PlaywrightError as error:  # the user can fix it: print one sentence, and end the run
                reason = first_line(error)
                said = re.search(r"\[err\] (?!.*dbus)(.+)", str(error))  # by Chromium itself; dbus it can do without
                if said:
                    reason = first_line(said[1])
                raise ValueError(f"Chromium failed: {reason}") from None
            except EnvError as error:
                raise ValueError(str(error)) from None
            self.stack = stack.pop_all()
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(PlaywrightError, EnvError):  # it may have been killed
            await bounded(self.chromium.close(), self.settings.timeout, "closing Chromium")
        await self.stack.aclose()

    async def launch(self):
        """Starts Chromium.

        Raises PlaywrightError if it fails on this machine, EnvError if on another one, ValueError if the settings
        cannot work.
        """
        flags = list(FLAGS)
        if self.settings.text_only:
            flags += ["--blink-settings=imagesEnabled=false", "--disable-remote-fonts"]
        if self.settings.browser:
            if self.visible:
                raise ValueError("--watch and --record open a window on this machine, but --browser names "
                                 "a Chromium on another one; leave out one of the two.")
            return await connect(self.playwright, self.settings, flags, self.sites)

        if os.geteuid() == 0:  # root cannot have a sandbox
            flags.append("--no-sandbox")
        if self.sites is not None:
            flags += fence(self.sites)
        path = find_chromium(self.playwright, self.visible)
        return await self.playwright.chromium.launch(executable_path=path, args=flags,
                                                     headless=not self.visible)

    async def revive(self):
        """Starts Chromium again if it crashed or hangs, or connects again to the one elsewhere.

        The episodes that were in it are environment errors.
        """
        # Ask without the lock first: logins hold it for long.
        if await self.is_alive():
            return
        async with self.one_at_a_time:
            end = time.monotonic() + self.settings.timeout
            while not await self.is_alive():
                try:
                    self.chromium = await self.launch()
                except (EnvError, PlaywrightError) as error:
                    # A server elsewhere that starts again takes seconds. Each episode that began
                    # meanwhile would be lost.
                    if time.monotonic() > end:
                        raise
                    await asyncio.sleep(1)
                    if isinstance(error, PlaywrightError):  # Playwright's own process may have died as well
                        await self.stack.aclose()
                        self.playwright = await self.stack.enter_async_context(async_playwright())

    async def is_alive(self) -> bool:
        if not self.chromium.is_connected():
            return False
        # Playwright notices late that a connection is broken, and never that a process hangs or a machine is off.
        with contextlib.suppress(PlaywrightError, EnvError):
            asking = self.chromium.new_browser_cdp_session()
            devtools = await bounded(asking, self.settings.timeout, "asking Chromium")
            await devtools.detach()
            return True
        return False

    async def open(self, task: dict) -> "Session":
        """Starts an episode in its own context and, if the task names a world, in its own world.

        task: as env.enter yields it. Of its keys, this reads start_url and, if they are there, world,
        storage_state, clock, script and private.
        """
        # The world travels in a header, not in a cookie, so that logging out does not change it.
        headers = {}
        if "world" in task:
            headers["X-World"] = f"{task['world']}-{uuid.uuid4().hex}"
        browser_context = await self.chromium.new_context(
            viewport={"width": 1280, "height": 720}, extra_http_headers=headers,
            storage_state=task.get("storage_state"), accept_downloads=False, service_workers="block",
            permissions=["clipboard-write"])  # "copy link", which a person's click allows
        browser_context.set_default_timeout(1000 * self.settings.timeout)
        browser_context.on("requestfailed", self._failed)

        session = Session(browser_context, self.settings, self.sites, task.get("private", []))
        async with contextlib.AsyncExitStack() as stack:  # closes the session if a start page fails
            stack.push_async_callback(session.close)
            if "clock" in task:  # it goes on from there: a clock that stands makes equal "unique" ids
                await browser_context.clock.install(time=task["clock"])
            if "script" in task:
                await browser_context.add_init_script(task["script"])
            await browser_context.add_init_script(SCRIPTS)
            for url in start_pages(task):
                await session.start(url)
            if browser_context.pages:
                session.page = browser_context.pages[0]  # the first start page
            await session.page.bring_to_front()
            stack.pop_all()
        return session

    def _failed(self, request):
        """Remembers the site of a request that failed because of the fence."""
        site = origin(request.url)
        by_network = (request.failure or "").startswith("net::")  # not by the page's own policy, "csp"
        if by_network and site and self.sites is not None and site not in self.sites:
            self.stopped.add(site)


# ------------------------------------------------------------------------------------ a session --


DOWNLOAD = "download:"  # in place of the address of a tab that was opened for one; no page can announce it


class Loading:
    """What a session waits for: frames that are loading, and tabs that are on their way."""

    def __init__(self):
        self.frames = set()          # that are loading; also new tabs, until they have a document
        self.announced = deque()     # addresses of tabs that are not here yet
        self.quiet = asyncio.Event()  # set while both are empty; not before the first load

    def _update(self):
        if self.frames or self.announced:
            self.quiet.clear()
        else:
            self.quiet.set()

    def began(self, frame):
        self.frames.add(frame)
        self._update()

    def ended(self, frame):
        self.frames.discard(frame)
        self._update()

    def announce(self, url: str):
        self.announced.append(url)
        self._update()

    def arrive(self, tab) -> str | None:
        """A tab has come and loads from now on -> the address it was announced with, or DOWNLOAD; None: it was not."""
        if not self.announced:
            return None
        url = self.announced.popleft()
        self.began(tab)
        return url

    def mark_download(self):
        """The tab that is on its way will stay empty: what it was opened for is a download."""
        if self.announced:
            self.announced[0] = DOWNLOAD

    def give_up(self):
        self.frames.clear()
        self.announced.clear()
        self._update()


class Session:
    """One episode's view of the web: its tabs, what is loading in them, and what an agent can do."""

    def __init__(self, browser_context, settings: BrowserSettings, sites: set[str] | None,
                 private: list[str]):
        self.browser_context = browser_context
        self.settings = settings
        self.sites = sites
        self.private = private      # paths that only the judge opens
        self.page = None            # the current tab
        self.came_from = {}         # each tab -> the one that was current when it opened
        self.devtools = {}          # each tab's connection to Chromium's own protocol
        self.notes: list[str] = []  # dialogs and the like, for the next observation
        self.hovered = False        # whether the agent has used Hover, which may have opened a menu
        self.loading = Loading()
        browser_context.on("page", self._adopt)

    async def start(self, url: str):
        """Opens a start page in a tab of its own. Raises EnvError if it fails."""
        self.loading.announce("about:blank")
        await self.browser_context.new_page()
        await self.loading.quiet.wait()  # until `_adopt` has it
        # `goto` could wait for all of the page, but then an image that never comes would end the episode.
        try:
            answer = await self.page.goto(url, wait_until="commit")
        except PlaywrightError as error:
            line = first_line(error)  # Page.goto: net::ERR_... at http://...
            problem = line.removeprefix("Page.goto: ").partition(" at http")[0]
            has_fence = self.sites is not None
            if has_fence and "ERR_NAME_NOT_RESOLVED" in problem:  # the fence knows no other site
                problem = "it leads to another site; --allow names more that pages may reach"
            raise EnvError(f"the start page {url} did not open: {problem}") from None
        await self.settle()
        # Later pages with an error are for the agent to read: it may have caused the error.
        if answer and (answer.status in (404, 410) or answer.status >= 500):
            raise EnvError(f"the start page {url} answered {answer.status}; is start_url right?")

    async def close(self):
        with contextlib.suppress(PlaywrightError, EnvError):
            await bounded(self.browser_context.close(), self.settings.timeout, "closing")

    # ---- tabs: they open, load, and close

    async def _adopt(self, page):
        """Makes a new tab the current one and listens to it."""
        self.came_from[page] = self.page
        self.page = page
        page.on("framenavigated", self._navigated)
        page.on("dialog", self._answer)
        page.on("download", self._decline)
        page.on("crash", self.loading.give_up)
        page.on("close", self._closed)
        # The tab may close at any time.
        with contextlib.suppress(PlaywrightError):
            devtools = await self.browser_context.new_cdp_session(page)
            self.devtools[page] = devtools
            self._listen(devtools)
            await devtools.send("Page.enable")
            if self.private:
                # Only documents wait for `_admit`, so what scripts fetch costs nothing.
                devtools.on("Fetch.requestPaused", partial(self._admit, devtools))
                await devtools.send("Fetch.enable", {"patterns": [{"resourceType": "Document"}]})
            await devtools.send("Page.setInterceptFileChooserDialog", {"enabled": True})
            await self._first_document(page)
        self.loading.ended(page)
        # If it closed before we listened, nobody has told us.
        if page.is_closed():
            self._closed(page)

    def _listen(self, devtools):
        """Keeps track of what is loading.

        The page's process announces a navigation before it answers our next message. So once `settle`
        has an answer, it knows whether an action started a navigation: no polling.
        """
        loading = self.loading

        def requested(event):
            if event["disposition"] == "currentTab":
                loading.began(event["frameId"])

        def started(event):
            loading.began(event["frameId"])

        def stopped(event):
            loading.ended(event["frameId"])

        def window_opens(event):
            url = event["url"]
            if re.match("https?:|blob:|about:|javascript:|$", url):  # mailto: and the like bring no tab
                loading.announce(url)

        def file_asked(event):
            self.notes.append("the page asks for a file, and you cannot choose one")

        devtools.on("Page.frameRequestedNavigation", requested)
        devtools.on("Page.frameStartedLoading", started)
        devtools.on("Page.frameStoppedLoading", stopped)
        devtools.on("Page.frameDetached", stopped)
        devtools.on("Page.windowOpen", window_opens)
        devtools.on("Page.fileChooserOpened", file_asked)

    async def _admit(self, devtools, event):
        """Lets a document load unless its path is private; then the tab stays where it is."""
        url = event["request"]["url"]
        answer = {"requestId": event["requestId"]}
        with contextlib.suppress(PlaywrightError):  # its tab may have closed
            if inside(url, self.private):
                self.notes.append(f"{url[:200]} is not for visitors and was not opened")
                await devtools.send("Fetch.failRequest", {**answer, "errorReason": "Aborted"})
            else:
                await devtools.send("Fetch.continueRequest", answer)

    async def _first_document(self, page):
        """Waits for the document that a tab was opened for."""
        url = self.loading.arrive(page)
        if url is None:
            return
        stays_empty = url == DOWNLOAD
        runs_script = url.startswith("javascript:")
        if runs_script:  # its tab stays empty, unless the page that opened it holds on to it
            stays_empty = await page.evaluate("window.opener === null")
        if stays_empty:
            await page.close()
            return
        # Every tab begins empty, and an empty document counts as loaded.
        if url not in ("", "about:blank") and not runs_script:
            await page.wait_for_url(lambda now: now != "about:blank", wait_until="commit")
        await page.wait_for_load_state("domcontentloaded")

    def _closed(self, page):
        """Goes back to the tab that opened this one, or else to the newest; waits for nothing that was loading."""
        tabs = self.browser_context.pages
        if page is self.page and tabs:
            opener = self.came_from.get(page)
            self.page = opener if opener in tabs else tabs[-1]
        self.loading.give_up()

    def _navigated(self, frame):
        """Notes what loads in a tab that the agent does not see, as a link to a named tab does."""
        tabs = self.browser_context.pages
        whole_tab = frame.parent_frame is None
        if whole_tab and frame.page is not self.page and frame.page in tabs:
            self.notes.append(f"tab {tabs.index(frame.page)} has loaded {frame.url[:200]}")

    async def _close_old_tabs(self):
        for tab in self.browser_context.pages[1:-7]:
            self.notes.append("an old tab was closed: at most eight stay open, the first and the newest")
            await tab.close()

    async def _answer(self, dialog):
        """Accepts a dialog, with the answer that the page proposes, and notes both."""
        said = dialog.message[:200]
        if dialog.type == "confirm":
            said += " (accepted)"
        elif dialog.type == "beforeunload":  # Chromium gives it no text
            said = "the page was left, and what was not saved may be lost"
        elif dialog.type == "prompt":
            said += f' (answered "{dialog.default_value[:200]}")'
        said = " ".join(said.split()).replace("<", "&lt;").replace(">", "&gt;")
        article = "an" if dialog.type == "alert" else "a"
        self.notes.append(f"the page showed {article} {dialog.type}: {said}")
        with contextlib.suppress(PlaywrightError):  # its tab may have closed
            await dialog.accept(dialog.default_value)

    def _decline(self):
        self.notes.append("a file was offered for download and not kept")
        self.loading.mark_download()

    async def _send(self, message: str) -> dict:
        """A message to Chromium about the current tab, by devtools."""
        if self.page not in self.devtools:
            raise PlaywrightError("the tab is still opening")
        return await self.devtools[self.page].send(message)

    # ---- what the agent reads

    async def observe(self) -> tuple[str, str]:
        """(url, simplified HTML) of the current page. Raises EnvError."""
        settings = self.settings
        # A page may navigate by itself between two of our messages. Then look again.
        for _ in range(3):
            await self.settle()
            if self.page.url.startswith("chrome-error:"):
                await self._leave_error_page()
                continue
            # A new tab's first document comes before anybody can refuse it.
            if self.private and any(inside(frame.url, self.private) for frame in self.page.frames):
                self.notes.append(f"{self.page.url[:200]} is not for visitors and was left")
                await self._leave()
                continue
            page = self.page
            try:
                await self._close_old_tabs()
                text = await self.ask("observe", settings.viewport_only, settings.max_page_chars)
            except PlaywrightError as error:
                if "Execution context was destroyed" in str(error) or self._closed_for_another(page):
                    continue
                raise EnvError(first_line(error)) from None
            text = text or "[this page is empty]"
            return self.page.url, readable(f"{self._take_notes()}{text}")
        raise EnvError("the page navigates away whenever it is opened")

    def _closed_for_another(self, page) -> bool:
        """Whether a tab has closed, as pop-ups do by themselves, and another is current now."""
        return page.is_closed() and page is not self.page

    async def ask(self, name: str, *given):
        """Calls a function of page/actions.js, as in ask("scroll", 1)."""
        return await self.run_script(CALL, [name, *given])

    async def run_script(self, script: str, given=None):
        """The value of a script in the page. A hostile page can change what it returns."""
        try:
            running = self.page.evaluate(script, given)
            return await bounded(running, self.settings.timeout, "reading the page")
        except (ValueError, TypeError, KeyError) as error:  # Playwright cannot decode the result
            raise EnvError(f"the page garbles what is read of it ({first_line(error)})") from None

    async def settle(self):
        """Waits for scripts and navigations. Stops a page that takes too long, and tells the agent."""
        timeout = self.settings.timeout
        end = time.monotonic() + timeout
        try:
            for _ in range(3):
                page = self.page
                await self._scripts_end()
                was_loading = not self.loading.quiet.is_set()
                left = max(0.1, end - time.monotonic())
                await bounded(self.loading.quiet.wait(), left, "loading")
                if page is self.page and not was_loading:
                    break
                # A document has loaded, or a tab has opened or closed. Wait for the scripts of what is there now.
        except TookTooLong:
            await self._stop(f"the page did not finish loading within {timeout:.0f} s and was stopped")
        except EnvError as error:
            await self._stop(f"the page was stopped: {error}")

    async def _scripts_end(self):
        """Waits for what the page's scripts have begun (see page/init.js), 3 s at most."""
        left = 3.0
        end = time.monotonic() + left
        files = None
        with contextlib.suppress(PlaywrightError):  # the page may navigate away meanwhile
            # A page does not see its scripts and styles before they arrive. So Chromium lists its files,
            # again and again until the page knows all of them.
            while left > 0 and await self.ask("settled", files, 1000 * left):
                asking = self._send("Page.getResourceTree")
                tree = await bounded(asking, self.settings.timeout, "loading")
                files = tree["frameTree"]["resources"]
                left = end - time.monotonic()

    async def _stop(self, note: str):
        """Stops loading the current tab; closes it if nothing has come."""
        self.notes.append(note)
        # A page may not react to this either.
        with contextlib.suppress(PlaywrightError, EnvError):
            if self.page in self.devtools:
                await bounded(self._send("Page.stopLoading"), 1, "stopping")
            empty = self.page.url in ("", "about:blank")
            if empty and len(self.browser_context.pages) > 1:
                await bounded(self.page.close(), 1, "closing")
        self.loading.give_up()

    async def _leave_error_page(self):
        """Leaves a page that the fence has blocked. Raises EnvError if it was a site that failed."""
        asking = self._send("Page.getFrameTree")
        tree = await bounded(asking, self.settings.timeout, "loading")
        url = tree["frameTree"]["frame"].get("unreachableUrl", "")
        blocked = self.sites is not None and url and origin(url) not in self.sites
        if not blocked:
            raise EnvError(f"{url[:200]} did not answer, or redirects without end")

        self.notes.append(f"{url[:200]} is not one of the task's sites and was not opened")
        await self._leave()

    async def _leave(self):
        """Back to where the current tab came from."""
        has_history = await self.run_script("history.length > 1")
        if not has_history and len(self.browser_context.pages) > 1:
            await self.page.close()
            return
        for _ in range(8):
            try:
                await self.page.go_back(wait_until="commit")  # `settle` waits for the rest
                return
            except PlaywrightError as error:
                if "ERR_CACHE_MISS" not in str(error):
                    raise
            await self.settle()  # that page answered a form and cannot be shown again: one further back

    def _take_notes(self) -> str:
        """The notes as lines of text; the next observation begins with none."""
        counted = Counter(self.notes).most_common()
        self.notes = []
        lines = []
        for note, n in counted[:8]:
            times = f" ({n} times)" if n > 1 else ""
            lines.append(f"note: {note}{times}\n")
        if len(counted) > 8:
            lines.append(f"note: {len(counted) - 8} more notes like these\n")
        tabs = self.browser_context.pages
        if len(tabs) > 1 and self.page in tabs:
            number = tabs.index(self.page)
            lines.append(f"note: this is tab {number} of {len(tabs)}, counted from 0\n")
        return "".join(lines)

    # ---- what the agent does

    async def execute(self, name: str, action, *arguments):
        """Carries out an action, one of the methods below. Raises ActionError with the agent's sentence.

        Here Playwright's errors become the agent's. If a script is in a loop, the action takes too long,
        and the next observation finds out whether the page still answers.
        """
        timeout = self.settings.timeout
        page = self.page
        try:
            await asyncio.wait_for(action(self, *arguments), timeout)
        except asyncio.TimeoutError:
            raise ActionError(f"the page did not react to {name} within {timeout:.0f} s") from None
        except PlaywrightError as error:
            if self._closed_for_another(page):  # the action closed its tab, so it worked
                return
            reason = first_line(error).split("Error: ", 1)[-1]
            raise ActionError(f"{name} failed: {reason}") from None

    async def click(self, element: int, button="left"):
        spot = await self._aim(element)
        # A press that takes the focus from a field makes scripts check the field. People hold the button
        # meanwhile, and so do we, for 100 ms.
        hold = 100 if spot.get("leaves") else 0
        await self.page.mouse.click(spot["x"], spot["y"], button=button, delay=hold)

    async def right_click(self, element: int):
        await self.click(element, button="right")

    async def hover(self, element: int):
        spot = await self._aim(element)
        await self.page.mouse.move(spot["x"], spot["y"])
        self.hovered = True

    async def _aim(self, element: int) -> dict:
        """As `_locate`, but looks again if the page moves while the mouse leaves what it hovered over."""
        spot = await self._locate(element)
        if self.hovered:  # only then: this takes a frame, 17 ms, as long as a click and an observation
            await self.page.mouse.move(spot["x"], spot["y"])
            if await self.ask("missed", element, spot["x"], spot["y"]):
                spot = await self._locate(element)
        return spot

    async def _locate(self, element: int) -> dict:
        """Where an element is: {"x", "y", "leaves"}."""
        spot = await self.ask("locate", element)
        if not isinstance(spot, dict):  # a hostile page may return anything
            spot = {}
        for key in "xy":
            if not isinstance(spot.get(key), (int, float)):
                raise ActionError(spot.get("error") or f"element {element} cannot be found")
        return spot

    async def type_text(self, element: int, text: str):
        handle = await self.page.evaluate_handle(CALL, ["focus", element, text])
        field = handle.as_element()
        if field is None:
            raise ActionError(str(handle))  # the reason
        way = await self.ask("wayToType", element)
        if way == "slider":
            await self._move_slider(element, text)
        elif way == "code":
            # Typed, the text would be indented once more, and its brackets closed. Pasted, it stays as it is.
            await self.page.keyboard.press("Control+a")
            await self.page.keyboard.press("Backspace")
            if not await self.ask("paste", element, text):
                await self.page.keyboard.insert_text(text)
        elif way in ("rich", "part"):
            # Rich editors follow the keys. `focus` has selected what they hold.
            if way == "rich" or not text:
                await self.page.keyboard.press("Backspace")
            first, *more = text.split("\n")
            await self.page.keyboard.type(first)
            for line in more:
                await self.page.keyboard.press("Shift+Enter")  # Enter alone would send a message
                await self.page.keyboard.type(line)
        else:
            # By force, which means without waiting: `focus` has checked the field.
            await field.fill(text, force=True)
            if way == "range":
                await self._step_and_back(element)
            misread = await self.ask("typed", element, text)
            if misread is True:  # a field with a mask, as for a phone number, takes only keys
                await field.select_text(force=True)
                await self.page.keyboard.type(" ".join(text.splitlines()))  # a line break would press Enter

    async def _step_and_back(self, element: int):
        """Moves an <input type=range> one step away and back: some scripts take a value only from a key."""
        keys = ["ArrowDown", "ArrowUp"]
        if await self.ask("atMinimum", element) is True:
            keys.reverse()
        for key in keys:
            await self.page.keyboard.press(key)

    async def _slider_at(self, element: int) -> float | None:
        """What a slider stands at that the page draws; None for any other element."""
        value = await self.ask("sliderAt", element)
        is_number = type(value) in (int, float) and math.isfinite(value)  # a hostile page may give anything
        return value if is_number else None

    async def _move_slider(self, element: int, text: str):
        """Moves the slider to the number in `text`, by the arrow keys, as its users can."""
        start = await self._slider_at(element)
        if start is None:
            raise ActionError(f"element {element} is a slider that does not say where it stands")
        if not re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", text.strip()):
            raise ActionError(f"element {element} is a slider at {start:g}: it takes a number")
        wanted = float(text)
        if wanted == start:
            return
        # 1) One press tells the step. Up and down mean more and less; right and left are exchanged where text runs
        #    to the left.
        keys = ("ArrowUp", "ArrowRight") if wanted > start else ("ArrowDown", "ArrowLeft")
        for key in keys:
            value = await self._after_keys(element, key, 1)
            if value != start:
                break
        if value is None:  # it has gone
            return

        # 2) The presses that are left. Below 0: it has gone too far, or the wrong way.
        step = value - start
        presses = 0
        if step != 0:
            presses = round(min((wanted - value) / step, 1000))
        if presses > 0:
            value = await self._after_keys(element, key, presses)
        if value is not None and not math.isclose(value, wanted, abs_tol=1e-9):
            raise ActionError(f"the slider {element} is at {value:.10g} now: by the keys it does not come to {text}")

    async def _after_keys(self, element: int, key: str, times: int) -> float | None:
        """Where the slider stands after a key was pressed so many times."""
        for _ in range(times):
            await self.page.keyboard.press(key)
        await self.settle()  # some pages draw in a later frame
        return await self._slider_at(element)

    async def search(self, element: int, text: str):
        await self.type_text(element, text)
        # Scripts may have to answer what was typed before they expect Enter.
        await self.settle()
        await self.press_enter()

    async def press_enter(self):
        await self.page.keyboard.press("Enter")

    async def select_option(self, element: int, option: str):
        problem = await self.ask("select", element, option)
        if problem:
            raise ActionError(f"cannot select {option!r} in element {element}: {problem}")

    async def scroll_up(self):
        await self.ask("scroll", -1)

    async def scroll_down(self):
        await self.ask("scroll", 1)

    async def switch_tab(self, number: str):
        tabs = self.browser_context.pages
        is_number = re.fullmatch("[0-9]{1,6}", number.strip())
        if not is_number or int(number) >= len(tabs):
            raise ActionError(f"there is no tab {number}; tabs are 0 to {len(tabs) - 1}")
        self.page = tabs[int(number)]
        await self.page.bring_to_front()

    async def go_back(self):
        await self._travel(-1, self.page.go_back, undo=self.page.go_forward)

    async def go_forward(self):
        await self._travel(1, self.page.go_forward, undo=self.page.go_back)

    async def history(self) -> tuple[list[dict], int]:
        """(the tab's history as Chromium's entries, each with a "url"; the index of the open one)."""
        history = await self._send("Page.getNavigationHistory")
        return history["entries"], history["currentIndex"]

    async def _travel(self, step: int, go, undo):
        """One step in the tab's history."""
        entries, position = await self.history()
        to = position + step
        # Each tab begins with a blank page.
        if not 0 <= to < len(entries) or entries[to]["url"] == "about:blank":
            raise ActionError("there is no further page in the history")
        try:
            await go(wait_until="commit", timeout=1000)  # `settle` waits for the rest
        except PlaywrightError as error:
            if "ERR_CACHE_MISS" in str(error):
                await self.settle()
                try:
                    await undo()
                except PlaywrightError:  # the page before it answered a form as well
                    await self.settle()
                    await self._leave()
                    raise ActionError("these pages answered forms and cannot be shown again: this is the one "
                                      "before them") from None
                raise ActionError("that page answered a form and cannot be shown again") from None
            # Any other: the next observation shows where we are.

    async def wait(self):
        await self.page.wait_for_timeout(1000)


# ------------------------------------------------------------------------------------ for judges --

UNCHANGED = read_script("page/unchanged.js")


async def await_unchanged(page):
    """Waits until a page has not changed for a second, 3 s at most. It may navigate meanwhile."""
    with contextlib.suppress(PlaywrightError):
        await page.evaluate(UNCHANGED)
    with contextlib.suppress(PlaywrightError):  # not "load": an image may never come
        await page.wait_for_load_state("domcontentloaded")
