"""Turns what a person does in a window into actions for the agent.

    session = await browser.open({**task, "script": SCRIPT})      # recorder.js, before the page's own scripts
    person = Person(session)
    await session.observe()
    wish = await person.next()       # Wish("Click", element=12); None: the window was closed
    await session.execute(...)       # the agent does it, not the person

recorder.js holds back what the person does. So every step of a demonstration is an action on an element
of the observation before it, carried out as an agent carries it out.
"""
import asyncio
import contextlib
from typing import NamedTuple

from playwright.async_api import Error as PlaywrightError

from .browser import read_script

SCRIPT = read_script("recorder.js")
ASK = "([name, ...given]) => window[Symbol.for('recorder')][name](...given)"
ACT = "() => window[Symbol.for('recorder')].act()"
HOLD = "onlyTyped => window[Symbol.for('recorder')].hold(onlyTyped)"

# A wish of recorder.js -> the action that fulfills it.
ON_ELEMENTS = {"click": "Click", "right click": "Right Click", "type": "Type", "search": "Search",
               "select": "Select Dropdown Option"}
OTHERS = {"enter": "Press Enter", "up": "Scroll Up", "down": "Scroll Down", "back": "Go Backward",
          "forward": "Go Forward", "tab": "Switch Tab"}


class Wish(NamedTuple):
    """An action that a person asks for."""
    name: str
    argument: str | None = None
    element: int | None = None


class Person:
    """The person at a session's window."""

    def __init__(self, session, say=print):
        """say: called with a sentence for the person."""
        self.session = session
        self.say = say
        self.left = None  # a wish for later: first a menu has to open, or another tab to come to the front
        self.carry_out = session.execute
        session.execute = self.execute

    async def execute(self, name: str, *given):
        """Session.execute, while recorder.js lets events pass."""
        tab = self.session.page  # an action may go to another
        await self.run_in(tab, ACT)
        try:
            await self.carry_out(name, *given)
        finally:
            await self.run_in(tab, HOLD, name == "Type")

    async def run_in(self, tab, script: str, given=None):
        # A new document holds everything back by itself. One that is on its way cannot be told.
        with contextlib.suppress(PlaywrightError, asyncio.TimeoutError):
            await asyncio.wait_for(tab.evaluate(script, given), 1)

    async def next(self) -> Wish | None:
        """Waits for what the person wants. None: all tabs are closed."""
        while True:
            told, self.left = self.left, None
            if told is None:
                told = await self.listen()
            if told is None:
                return None
            wish = await self.understand(told)
            if wish is not None:
                return wish

    async def listen(self) -> dict | None:
        """The next wish of recorder.js."""
        self.tab = self.session.page
        try:
            self.entries, self.position = await self.session.history()
            return await self.first_wish()
        except PlaywrightError:  # a page went elsewhere, or a tab was closed
            return None if await self.is_gone() else {"kind": "moved"}

    async def is_gone(self) -> bool:
        """Whether the window was closed."""
        await asyncio.sleep(0.3)  # until Playwright knows
        return not self.session.browser_context.pages

    async def first_wish(self) -> dict:
        """The first wish in any tab: no page is told when a person switches tabs, so all are asked."""
        tabs = self.session.browser_context.pages
        asked = {asyncio.ensure_future(tab.evaluate(ASK, ["next"])): tab for tab in tabs}
        try:
            while self.session.page is self.tab:
                await asyncio.wait(asked, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                for asking, tab in asked.items():
                    if asking.done():
                        return self.with_tab_first(tab, asking.result())
            return {"kind": "moved"}  # a tab has opened by itself
        finally:
            for asking in asked:
                asking.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def with_tab_first(self, tab, told: dict) -> dict:
        """The wish, if it was made in the agent's tab. Else keeps it for later and returns the wish to go there."""
        if tab is self.tab:
            return told
        self.left = told
        return {"kind": "tab", "text": self.number_of(tab)}

    def number_of(self, tab) -> str:
        return str(self.session.browser_context.pages.index(tab))

    async def understand(self, told: dict) -> Wish | None:
        """A wish of recorder.js as an action. None: there is none, and the person has been told why."""
        kind = told["kind"]
        if kind == "moved":
            return await self.moved()
        if kind in OTHERS:
            return Wish(OTHERS[kind], told.get("text"))

        element = await self.id_of(told["node"])
        if element >= 0:
            return Wish(ON_ELEMENTS[kind], told.get("text"), element)
        # Perhaps it is in a menu that has opened under the mouse. Then an agent has to open it first.
        if kind == "click" and told["over"] is not None:
            menu = await self.id_of(told["over"])
            if menu >= 0:
                self.left = {**told, "over": None}
                return Wish("Hover", element=menu)
        self.say("This is nothing that an agent can see or use; nothing was done.")
        return None

    async def id_of(self, node: int) -> int:
        """The id of a node in the last observation; -1: it has none."""
        return await self.session.run_script(ASK, ["idOf", node])

    async def moved(self) -> Wish:
        """The page changed without the agent. What the window's buttons did, the agent shall do."""
        session = self.session
        if session.page is not self.tab:
            return Wish("Switch Tab", self.number_of(session.page))
        await session.settle()
        entries, position = await session.history()
        if position == self.position - 1:
            await session.page.go_forward(wait_until="commit")
            return Wish("Go Backward")
        if position == self.position + 1 and len(entries) == len(self.entries):
            await session.page.go_back(wait_until="commit")
            return Wish("Go Forward")
        return Wish("Wait")
