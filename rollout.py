"""Everything that touches the browser: actions, observations, episodes, the engine that serves many episodes at once.

One turn:   observe(page) -> text with element ids -> the policy's response -> parse -> execute -> settle -> next turn

    - `ACTIONS` is the only list of actions: prompt, parser and executor are read off it, so they cannot drift apart.
    - The ids an observation writes are the ids an action resolves: both refer to one array of elements, so ids that a
      page prints mean nothing. (The page holds the array; a hostile script could exchange it, as it could its buttons.)
    - What the agent does wrong is data: it reads one sentence about it in its next observation (`ActionError`).
      What the world does wrong ends the episode as "env_error" (`EnvError`), which is not a reward of 0.
    - Nothing sleeps but the action Wait, which is the agent's. After any other we wait for the navigations that it
      started, as the browser itself reports them, and for the requests, short timers and animation frames that a script
      of the page has begun, three seconds at most.
    - `Engine` decodes all episodes that wait for a response in one batch, admits whoever is ready and keeps the keys
      and values of a history between turns, so that a turn prefills only what is new since the last.

Words: a browser context is a private browser, with cookies and tabs of its own, within one Chromium process; a page is
a tab, a frame a document within a page; an origin is scheme, host and port; a storage state is saved cookies, and so a
login. Devtools is Chromium's own protocol, which tells of navigations before Playwright does. An element's name is what
a person would call it: its label, text or title. A slot is the number of the worker that plays an episode, and of its
row in the KV cache.

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
from dataclasses import dataclass, field
from typing import Awaitable, Callable
from urllib.parse import urlsplit

import torch
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import async_playwright

from compress import Chat, Trajectory, Turn, answer_of, context, fit_page, replay
from model import KVCache, RecordedStep, Transformer, sample, unsharded


@dataclass
class Settings:
    """Knobs of a rollout; the scripts' Configs inherit them."""
    max_turns: int = 15            # responses per episode
    max_new_tokens: int = 1024     # per response
    max_context: int = 16384       # tokens of history, page and response together
    concurrency: int = 16          # episodes at once, each with its own browser context and cache slot
    timeout: float = 30.0          # seconds a page may take to load
    deterministic: bool = False    # turns in lock-step, episodes tied to slots: slower, every run equal bit for bit
    cuda_graph: bool = True        # on a GPU: decode all slots by one recorded graph instead of kernel by kernel
    text_only: bool = False        # do not load images and fonts: lighter, but what only an image sizes may disappear
    allow: str = ""                # further origins that pages may reach, http://host:port with commas; all: no fence
    observation: str = "compact"   # or webrl: attributes and boxes as in WebRL's data, which saw --viewport-only
    viewport_only: bool = False    # show only what is within the 1280 x 720 window instead of the whole page
    max_page_chars: int = 200_000  # a page's text is cut here before it is tokenized

    def __post_init__(self):
        if self.observation not in ("compact", "webrl"):
            raise ValueError(f"--observation {self.observation}: use compact or webrl.")
        if self.max_new_tokens >= self.max_context:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} leaves no room for a page within --max-context "
                             f"{self.max_context}; make one smaller or the other larger.")


class ActionError(Exception):
    """The agent asked for something impossible; the message is what it reads."""


class EnvError(Exception):
    """The world failed: site down, page crashed, browser gone. The episode is void."""


# --------------------------------------------------------------------------------------------------------------------
# Observation: a page as simplified HTML

# Of a link around blocks, or around what floats, the first box is empty: where it is then tells its content.
BOX_OF = """
  const boxOf = el => {
    const range = new Range(), seen = r => r.width >= 1 && r.height >= 1;
    range.selectNodeContents(el);
    return [...el.getClientRects()].find(seen) || [...range.getClientRects()].find(seen);
  };"""

# Returns the text; the page keeps the elements that the ids in it stand for. One walk decides what is shown and what
# can be used; two ways to write it down. Compact: a usable element is <tag>name id[ = value]</tag>, name then id, side
# by side, so that finding an element by its name is copying what once followed that name. webrl: nested tags as in the
# data of WebRL and WebArena-Lite, <tag id="ID" data-text="..." data-bbox="x,y,w,h"> text </tag>; which elements get ids
# follows our walk.
OBSERVE = r"""
([webrl, viewportOnly, maxChars]) => {
  BOX_OF
  const elements = [], lines = [];
  let line = '', size = 0, tight = false;  // tight: the line ends in text, with no white space behind it
  const escape = s => s.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');
  const tidy = s => (typeof s === 'string' ? s : '').replace(/[\s\u00a0]+/g, ' ').trim();
  const flush = () => { if (line.trim()) { lines.push(line.trim()); size += line.length; } line = ''; tight = false; };
  const put = (s, joined) => { if (s) line += (line && !line.endsWith(' ') && !joined ? ' ' : '') + s; tight = false; };
  const ROLES = new RegExp('^(button|link|tab|checkbox|radio|switch|option|combobox|textbox|searchbox|slider|'
    + 'menuitem(checkbox|radio)?)$');
  const clickHandlers = window[Symbol.for('click handlers')], range = new Range();
  // The fields of a form hide its own properties of their names, and so do images those of the document.
  const real = (type, name) => {
    const {get, value} = Object.getOwnPropertyDescriptor(type.prototype, name);
    return get ? node => get.call(node) : (node, ...rest) => value.call(node, ...rest);
  };
  const [nodeType, parentOf, childNodes, contains] = ['nodeType', 'parentElement', 'childNodes', 'contains'].map(
    name => real(Node, name));
  const shadowRoot = real(Element, 'shadowRoot'), bodyOf = real(Document, 'body');

  // No box: not displayed, or inside something closed. A dropdown's options have none either, and belong to it.
  const shown = (el, style) => style.display === 'contents' || /^opt/.test(el.localName)
    || el.checkVisibility({visibilityProperty: true});
  const inWindow = node => {  // of a text its own lines: the boxes of its ancestors may lie elsewhere
    if (!viewportOnly) return true;
    range.selectNode(node);
    const r = (node.nodeType === 3 ? range : node.closest('select') || node).getBoundingClientRect();
    let left = 0, top = 0;
    for (let w = node.ownerDocument.defaultView; w !== window && w?.frameElement; w = w.parent) {
      const at = w.frameElement.getBoundingClientRect();
      left += at.left; top += at.top;
    }
    return top + r.bottom > 0 && left + r.right > 0 && top + r.top < innerHeight && left + r.left < innerWidth;
  };
  const role = el => el.getAttribute('role') || '';
  const NATIVE = 'a[href],button,select,textarea,summary,input:not([type=hidden])';
  const native = el => el.matches(NATIVE);
  const marked = el => native(el) || ROLES.test(role(el)) || clickHandlers?.has(el);
  const disabled = el => el.matches(':disabled');  // el.disabled: of a form, an input of that name
  // Of a control that is styled away the label is what one sees and presses.
  const stands = el => el.localName === 'label' && el.control?.matches('input[type=checkbox],input[type=radio]')
    && !disabled(el.control) && !shown(el.control, getComputedStyle(el.control));
  const clickable = (el, style) => !disabled(el) && el.getAttribute('aria-disabled') !== 'true' && (marked(el)
    || stands(el) || typeof el.onclick === 'function' || el.isContentEditable && !el.parentElement?.isContentEditable
    || el.tabIndex >= 0 && el.hasAttribute('tabindex')
    || style.cursor === 'pointer' && el.parentElement && getComputedStyle(el.parentElement).cursor !== 'pointer');
  const innermost = el => native(el) || ![...el.querySelectorAll('*')].some(
    inner => marked(inner) && !disabled(inner) && shown(inner, getComputedStyle(inner)));
  const covered = el => {  // something else lies on top; can be told only for what is inside the window
    const r = boxOf(el);
    if (!r) return !el.matches('input[type=checkbox],input[type=radio]');
    const x = r.left + r.width / 2, y = r.top + r.height / 2;
    if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) return false;
    const hit = el.getRootNode().elementFromPoint?.(x, y);
    if (!hit || contains(el, hit) || contains(hit, el) || hit.closest('label')?.control === el) return false;
    for (let panel = parentOf(el); panel; panel = parentOf(panel)) {  // what a panel hides, LOCATE scrolls into it
      const {left, right, top, bottom} = panel.getBoundingClientRect();
      const within = x >= left && x < right && y >= top && y < bottom;
      if (!within && /auto|scroll/.test(getComputedStyle(panel).overflow)) return false;
    }
    return true;
  };
  const childrenOf = el => el.localName === 'iframe' ? [el.contentDocument?.body]  // null where another site's
    : shadowRoot(el) ? shadowRoot(el).childNodes
    : el.localName === 'slot' && el.assignedNodes().length ? el.assignedNodes() : childNodes(el);

  const labelText = el => {
    const copy = el.cloneNode(true);
    copy.querySelectorAll('input,select,textarea,button').forEach(control => control.remove());
    return tidy(copy.textContent);
  };
  const nameOf = el => {
    const control = el.matches('input,select,textarea'), attribute = name => tidy(el.getAttribute(name));
    const others = attribute('aria-labelledby').split(' ').map(id => id && el.ownerDocument.getElementById(id));
    return attribute('aria-label') || tidy(others.map(other => other?.textContent).join(' '))
      || (control && el.labels?.length ? labelText(el.labels[0]) : '')
      || (el.matches('input[type=submit],input[type=button],input[type=reset]') ? tidy(el.value) || el.type : '')
      || (control ? '' : tidy(el.innerText ?? el.textContent)) || tidy(el.placeholder) || tidy(el.title)
      || tidy(el.alt || el.querySelector('img[alt]')?.alt || el.querySelector('svg title')?.textContent)
      || tidy(el.name) || tidy(el.id) || attribute('class');
  };
  const kindOf = el => {
    const type = el.localName === 'input' ? el.type : '';
    if (/^(checkbox|radio)$/.test(type)) return type;
    if (type) return /^(submit|button|reset|image)$/.test(type) ? 'button' : 'input';
    return /^(checkbox|radio|button|link)$/.test(role(el)) ? role(el).replace('link', 'a') : el.localName;
  };
  const valueOf = el => {
    const kind = kindOf(el), text = option => tidy(option?.text), checked = el.checked ?? el.ariaChecked === 'true';
    if (/^(checkbox|radio)$/.test(kind)) return checked ? 'on' : 'off';
    const options = el.options && [...el.options].slice(0, 60).map(text).join(' | ');
    if (kind === 'select') return `${text(el.selectedOptions[0])} (${options})`;
    if (el.isContentEditable) return el.hasAttribute('aria-label') ? tidy(el.innerText).slice(0, 500) : '';
    if (kind !== 'input' && kind !== 'textarea') return '';
    return el.type === 'password' ? (el.value ? '****' : '') : tidy(el.value).slice(0, 500);
  };
  const said = (el, id = '') => escape(nameOf(el).slice(0, 300)) + id + (valueOf(el) && ' = ' + escape(valueOf(el)));
  const usableLine = el => {
    const told = stands(el) ? el.control : el, kind = kindOf(told);
    put(`<${kind}>${said(told, ` ${elements.length}`)}</${kind}>`);
    elements.push(el);
  };
  const compact = (el, style, near, usable) => {
    const children = () => { for (const child of childrenOf(el)) visit(child); };
    const block = !/^(inline|contents|table-cell|ruby)/.test(style.display) && el.localName !== 'select' && !usable;
    const apart = !/^(inline|contents)$/.test(style.display) || /[1-9]/.test(style.margin + style.padding);
    if (block) flush();
    if (apart) tight = false;
    if (style.display === 'table-cell' && line.trim()) put('|');
    if (el.localName === 'label' && el.control && shown(el.control, getComputedStyle(el.control))) {
      for (const inner of el.querySelectorAll(NATIVE)) visit(inner);  // its text is the control's name already
    } else if (usable) {
      if (!covered(el)) usableLine(el);
    } else if (/^h[1-6]$/.test(el.localName)) {
      flush(); children(); if (line) line = `<${el.localName}>${line.trim()}</${el.localName}>`; flush();
    } else if (el.localName === 'img') { if (near) put(escape(tidy(el.alt)));
    } else if (el.matches('button,input,select,textarea') && disabled(el)) { if (near) put(said(el) + ' (disabled)');
    } else children();
    if (block) flush();
    if (apart) tight = false;
  };
  const ATTRIBUTES = ['title', 'value', 'type', 'placeholder', 'selected', 'data-value', 'data-text', 'data-testid',
    'data-label', 'data-bbox', 'data-status'];
  const nested = (el, style, near, usable) => {
    const id = usable && !covered(el) ? ` id="${elements.push(el) - 1}"` : '', box = el.getClientRects()[0];
    const safe = s => tidy(s).slice(0, 500).replace(/</g, '&lt;').replace(/>/g, '&gt;');  // "&" stays, as in the data
    const texts = [...el.childNodes].map(n => n.nodeType === 3 ? safe(n.data) : '');
    const [x, y, right, bottom] = box ? [box.left, box.top, box.right, box.bottom].map(Math.round) : [];
    const now = {
      'data-value': el.matches('input,textarea,select') ? el.value : null,
      'data-text': el.matches('select') ? el.selectedOptions[0]?.text : texts.filter(Boolean).join(','),
      'data-bbox': box && `${x},${y},${right - x},${bottom - y}`,
      'data-status': el.type === 'checkbox' ? (el.checked ? 'checked' : 'not-checked') : el.selected && 'selected'};
    const told = new Map();  // value -> attribute: what repeats an earlier one is left out
    for (const name of ATTRIBUTES) {
      const value = safe(now[name] ?? el.getAttribute(name));
      if (value && !told.has(value)) told.set(value, name);
    }
    const inside = [...childrenOf(el)].filter(child => child && nodeType(child) === 1).map(visit).filter(Boolean);
    const telling = inside.length + (el.localName === 'html');  // there, the head counts as one
    if (!id && !(near && (told.size > (box ? 1 : 0) || telling > 1))) return inside.join(' ');
    const opening = `<${el.localName}${id}${[...told].map(([value, name]) => ` ${name}="${value}"`).join('')}>`;
    size += opening.length;
    return [opening, texts[0], ...inside, `</${el.localName}>`].filter(Boolean).join(' ');
  };

  const visit = node => {
    try {
      return look(node);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      return [...childrenOf(node)].map(visit).join(' ');  // a form that a field's name has spoilt: what it holds
    }
  };
  const look = node => {
    if (!node || size > maxChars) return '';
    if (nodeType(node) === 3) {
      if (!inWindow(node)) return '';
      put(escape(tidy(node.data)), tight && !/^\s/.test(node.data));
      tight = /\S$/.test(node.data);
      return '';
    }
    if (nodeType(node) !== 1 || /^(script|style|noscript|template|head|object|embed)$/.test(node.localName)) return '';
    if (node.localName === 'br') return flush();
    const style = getComputedStyle(node);
    if (!shown(node, style) || node.getAttribute('aria-hidden') === 'true') return '';
    const near = inWindow(node), usable = near && clickable(node, style) && innermost(node);
    return (webrl ? nested : compact)(node, style, near, usable);
  };
  if (webrl) lines.push(visit(document.documentElement));
  else {
    if (document.title) lines.push(`<title>${escape(tidy(document.title).slice(0, 200))}</title>`);
    visit(bodyOf(document));
    flush();
  }
  let text = lines.join('\n');
  if (text.length > maxChars) text = text.slice(0, maxChars) + '\n[the page goes on]';
  window[Symbol.for('elements')] = elements;  // for LOCATE and the like: what the ids mean until the next observation
  return text;
}
""".replace("BOX_OF", BOX_OF)
READ = f"async arguments => {{ await window[Symbol.for('work')]?.done(); return ({OBSERVE})(arguments); }}"

# Runs in every document before its own scripts. Elements that listen for clicks by addEventListener carry no mark that an
# observation could read; this notes them. And it notes work that a script has begun and that may change what the page
# shows: requests, short timers, animation frames, each for as long as it is worth waiting for. What such work begins in
# its turn counts three times over, so that an animation that never ends is not waited for.
INIT = r"""
(() => {
  const begun = new Map(), timers = new Map(), frames = new Map();
  const later = window.setTimeout.bind(window), now = performance.now.bind(performance);
  let depth = 0;
  const begin = ms => { const work = {}; if (depth < 3) begun.set(work, now() + ms); return work; };
  const counted = (schedule, running) => (callback, ...rest) => {
    if (typeof callback !== 'function' || rest[0] > 500) return schedule(callback, ...rest);
    const work = begin(1000), within = depth + 1;
    const id = schedule((...given) => {
      const before = depth;
      running.delete(id);
      depth = within;
      try { callback.apply(window, given); } finally { depth = before; begun.delete(work); }
    }, ...rest);
    running.set(id, work);
    return id;
  };
  const uncounted = (cancel, running) => id => { begun.delete(running.get(id)); running.delete(id); cancel(id); };
  window.setTimeout = counted(later, timers);
  window.clearTimeout = uncounted(window.clearTimeout.bind(window), timers);
  window.requestAnimationFrame = counted(window.requestAnimationFrame.bind(window), frames);
  window.cancelAnimationFrame = uncounted(window.cancelAnimationFrame.bind(window), frames);
  const {fetch} = window, {send} = XMLHttpRequest.prototype;
  window.fetch = (...request) => {
    const work = begin(3000), end = () => later(() => begun.delete(work), 50), answer = fetch(...request);
    answer.then(end, end);  // the body is read after that
    return answer;
  };
  XMLHttpRequest.prototype.send = function (...body) {
    const work = begin(3000);
    this.addEventListener('loadend', () => later(() => begun.delete(work)));
    return send.apply(this, body);
  };
  const busy = () => [...begun.values()].some(end => now() < end);
  let tired = 0;  // until then nothing is waited for: what has not come in three seconds is not asked for twice
  const done = async () => {
    const end = now() + 3000;
    while (busy() && now() > tired) {
      if (now() > end) tired = now() + 1000;
      else await new Promise(done => later(done, 10));
    }
  };
  const task = () => new Promise(done => later(done));
  Object.defineProperty(window, Symbol.for('work'), {value: {done, task}});

  const heard = new WeakSet(), add = EventTarget.prototype.addEventListener;
  Object.defineProperty(window, Symbol.for('click handlers'), {value: heard});
  EventTarget.prototype.addEventListener = function (type, ...rest) {
    if (/^(click|mousedown|mouseup|pointerdown|pointerup)$/.test(type) && this instanceof Element
        && this !== document.body && this !== document.documentElement) heard.add(this);
    return add.call(this, type, ...rest);
  };
})();
"""

SETTLED = "(async work => { await work.task(); await work.done(); })(window[Symbol.for('work')])"
ELEMENT = "id => window[Symbol.for('elements')]?.[id]"

# Where to aim the mouse: the centre of the element's first box, scrolled into view, iframe offsets added.
LOCATE = r"""
id => {
  BOX_OF
  const el = window[Symbol.for('elements')]?.[id];
  if (!el) return {error: `there is no element ${id} on this page`};
  if (!el.isConnected) return {error: `element ${id} is no longer on the page`};
  const parked = r => r && (r.right + scrollX <= 0 || r.bottom + scrollY <= 0);  // where nobody can scroll to
  const aim = parked(el.getBoundingClientRect()) && el.labels?.[0] || el;  // of a control that is styled away: its label
  aim.scrollIntoView({block: 'center', inline: 'center', behavior: 'instant'});
  const r = boxOf(aim) || aim.getClientRects()[0];
  if (!r || parked(r)) return {error: `element ${id} is hidden now`};
  let x = r.left + r.width / 2, y = r.top + r.height / 2;
  for (let w = el.ownerDocument.defaultView; w !== window && w?.frameElement; w = w.parent) {
    const f = w.frameElement, at = f.getBoundingClientRect(), style = getComputedStyle(f);
    x = at.left + (f.clientLeft + parseFloat(style.paddingLeft) + x) * at.width / f.offsetWidth;
    y = at.top + (f.clientTop + parseFloat(style.paddingTop) + y) * at.height / f.offsetHeight;
  }
  return {x, y};
}
""".replace("BOX_OF", BOX_OF)


# --------------------------------------------------------------------------------------------------------------------
# Actions: one table


@dataclass(frozen=True)
class Action:
    signature: str  # what the prompt shows
    help: str
    element: bool   # needs element="12"
    argument: bool  # needs argument="..."
    run: Callable[["Session", "Call"], Awaitable[None]] | None


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


async def click(session, call, button="left"):
    x, y = await session.locate(call.element)
    await session.page.mouse.click(x, y, button=button)


# What listens to keys alone, as lists of suggestions do, hears of the last one.
KEY = """(el, key) => {
  el.focus();
  for (const type of ['keydown', 'keyup']) el.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true}));
}"""


async def type_text(session, call):
    box = (await session.page.evaluate_handle(ELEMENT, int(call.element))).as_element()
    if box is None:
        raise ActionError(f"there is no element {call.element} on this page")
    try:
        # Asked beforehand, because `fill` would wait for a locked or hidden field until the time is up.
        takes_text = await box.is_visible() and await box.is_editable()
    except PlaywrightError as error:  # neither a field nor editable in any other way
        if session.dead:
            raise
        raise ActionError(f"element {call.element} does not take text ({first_line(error)})") from None
    if not takes_text:
        raise ActionError(f"element {call.element} does not take text: it is locked or hidden")
    await box.fill(call.argument)
    await box.evaluate(KEY, call.argument[-1:] or "Backspace")


async def search(session, call):
    await type_text(session, call)
    await session.page.keyboard.press("Enter")


async def select_option(session, call):
    chosen = await session.ask("""([id, wanted]) => {
        const el = window[Symbol.for('elements')]?.[id], options = [...(el?.options || [])];
        const tidy = s => s.replace(/[\\s\\u00a0]+/g, ' ').trim().toLowerCase(), w = tidy(wanted);
        const open = options.filter(p => !p.disabled);
        const found = open.find(p => tidy(p.text) === w) || w && open.find(p => tidy(p.text).includes(w));
        if (!options.length) return 'it is no dropdown';
        const some = open.slice(0, 60).map(p => p.text.trim()).join(', ') + (open[60] ? ', ...' : '');
        if (!found) return 'its options are: ' + some;
        found.selected = true;
        for (const type of ['input', 'change']) el.dispatchEvent(new Event(type, {bubbles: true}));
        return '';
    }""", [int(call.element), call.argument])
    if chosen:
        raise ActionError(f"cannot select {call.argument!r} in element {call.element}: {chosen}")


async def history(session, offset):
    before, (there, back) = session.page.url, (session.page.go_back, session.page.go_forward)[::-offset]
    try:
        moved = await there()
    except PlaywrightError as error:
        if "ERR_CACHE_MISS" not in str(error):
            raise
        await session.settle()
        await back()
        raise ActionError("that page answered a form and cannot be shown again") from None
    if moved is None and session.page.url in (before, "about:blank"):
        if session.page.url != before:
            await session.page.go_forward()  # every tab began on an empty page, where there is nothing to do
        raise ActionError("there is no further page in the history")


async def switch_tab(session, call):
    tabs = [page for page in session.context.pages if not page.is_closed()]
    if not is_number(call.argument.strip()) or int(call.argument) >= len(tabs):
        raise ActionError(f"there is no tab {call.argument}; tabs are 0 to {len(tabs) - 1}")
    session.page = tabs[int(call.argument)]
    await session.page.bring_to_front()


SCROLL = """direction => {
  const root = document.scrollingElement, longer = el => el.scrollHeight > el.clientHeight;
  let el = root && longer(root) ? null : document.elementFromPoint(innerWidth / 2, innerHeight / 2);
  while (el && !(longer(el) && /auto|scroll/.test(getComputedStyle(el).overflowY))) el = el.parentElement;
  (el || window).scrollBy({top: direction * (el?.clientHeight || innerHeight) * 2 / 3, behavior: 'instant'});
}"""


def scroll(direction):  # the page, or the panel in its middle where the page is as high as the window
    return lambda s, c: s.ask(SCROLL, direction)


async def hover(session, call):
    await session.page.mouse.move(*await session.locate(call.element))


ACTIONS = {
    "Click": Action('do(action="Click", element="12")', "click an element", True, False, click),
    "Right Click": Action('do(action="Right Click", element="12")', "click with the right button", True, False,
                          lambda s, c: click(s, c, button="right")),
    "Type": Action('do(action="Type", argument="text", element="12")', "replace a field's text", True, True, type_text),
    "Search": Action('do(action="Search", argument="text", element="12")', "type into a field and press Enter",
                     True, True, search),
    "Select Dropdown Option": Action('do(action="Select Dropdown Option", argument="option", element="12")',
                                     "choose an option of a dropdown by its text", True, True, select_option),
    "Hover": Action('do(action="Hover", element="12")', "move the mouse over an element", True, False, hover),
    "Scroll Up": Action('do(action="Scroll Up")', "scroll up by two thirds of a screen", False, False, scroll(-1)),
    "Scroll Down": Action('do(action="Scroll Down")', "scroll down by two thirds of a screen", False, False, scroll(1)),
    "Press Enter": Action('do(action="Press Enter")', "press Enter in the field used last", False, False,
                          lambda s, c: s.page.keyboard.press("Enter")),
    "Switch Tab": Action('do(action="Switch Tab", argument="0")', "go to another tab, counted from 0", False, True,
                         switch_tab),
    "Go Backward": Action("go_backward()", "return to the previous page", False, False, lambda s, c: history(s, -1)),
    "Go Forward": Action("go_forward()", "undo a go_backward", False, False, lambda s, c: history(s, 1)),
    "Wait": Action('do(action="Wait")', "wait for one second", False, False,
                   lambda s, c: s.page.wait_for_timeout(1000)),
    "exit": Action('exit(message="...")', "end the task; the message is the answer, or empty", False, True, None),
}
SHORTHANDS = {"go_backward": "Go Backward", "go_forward": "Go Forward"}


def actions_help() -> str:
    """The action list of the system prompt."""
    return "\n".join(f"- {a.signature}: {a.help}" for a in ACTIONS.values())


def is_number(text: str) -> bool:
    """Whether int() may have it: of digits there are more kinds, and numbers of any length."""
    return text.isascii() and text.isdigit() and len(text) < 7


def read_call(text: str) -> tuple[str, dict[str, str], list[str]] | None:
    """'do("Click", element="12")' -> ("do", {"element": "12"}, ["Click"]); None if it is anything but one such call."""
    def as_text(node):  # -3.50 stays as it was written
        value = ast.literal_eval(node)
        return value if isinstance(value, str) else ast.get_source_segment(text, node)

    try:
        node = ast.parse(text[:8000], mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            arguments = {keyword.arg: as_text(keyword.value) for keyword in node.keywords}
            return node.func.id, arguments, [as_text(value) for value in node.args]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None


def parse(response: str) -> Call:
    """The one call in a response; comment lines and code fences around it are passed over. Raises ActionError."""
    answer = answer_of(response)
    if answer is None:
        raise ActionError("the response was cut before </answer>")
    lines = re.split(r"\r\n?|\n", answer)
    first = re.compile(r"\s*(do|exit|go_backward|go_forward)\s*\(")
    start = next((i for i, line in enumerate(lines) if first.match(line)), None)
    if start is None:
        raise ActionError('no action found; write one call such as do(action="Click", element="12")')
    lines = lines[start:]
    # Both the call and a text in it may span lines, the latter with "#" and empty ones, too.
    written = lambda: read_call("\n".join(lines).strip()) or read_call("\\n".join(lines).strip())
    while not (read := written()) and len(lines) > 1 and re.match(r"\s*(#|```|$)", lines[-1]):
        lines.pop()
    if not read:
        raise ActionError(f"cannot read the action {lines[0].strip()[:80]!r}; write exactly one call a round")
    function, arguments, positional = read
    if function == "exit":
        return Call("exit", arguments.get("message", next(iter([*positional, *arguments.values()]), "")))
    name = SHORTHANDS.get(function) or arguments.get("action") or (positional[0] if positional else "")
    action = ACTIONS.get(name)
    if action is None or name == "exit":
        raise ActionError(f"unknown action {name!r}; use one of: {', '.join(ACTIONS)}")
    call = Call(name, arguments.get("argument") if action.argument else None,
                arguments.get("element", "").strip("[]# ") if action.element else None)
    if action.element and not is_number(call.element):
        raise ActionError(f'{name} needs the id of an element, as in {action.signature}')
    if action.argument and call.argument is None:
        raise ActionError(f"{name} needs an argument, as in {action.signature}")
    return call


# --------------------------------------------------------------------------------------------------------------------
# The browser


def readable(text) -> str:
    """What a page gave, as text that UTF-8 can hold: its script may cut a surrogate pair in half."""
    return str(text).encode("utf-8", "replace").decode()


def first_line(error: Exception) -> str:
    return readable(error).strip().split("\n")[0][:200]


async def bounded(work: Awaitable, seconds: float, what: str):
    """Playwright bounds its own waiting, but not a page's script, which may run for ever."""
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError:
        raise EnvError(f"{what} took more than {seconds:.0f} s") from None


def find_chromium(playwright) -> str:
    """Playwright's own Chromium if it was downloaded, else one of the system."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    candidates = [playwright.chromium.executable_path, *filter(None, map(shutil.which, names))]
    found = next((path for path in candidates if os.path.exists(path)), None)
    if found is None:
        raise ValueError("no Chromium found: run `playwright install chromium --only-shell`, or install a system one "
                         "(Debian: apt-get install chromium-headless-shell).")
    return found


# Chromium heeds only the last --disable-features, so those of Playwright's own that matter here are repeated. The last
# three replace frame or process at every navigation for security that a fresh context gives anyway; without them a page
# costs about 40% less CPU (tests/bench.py).
DISABLED_FEATURES = ("HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable", "MediaRouter", "PaintHolding",
                     "OptimizationHints", "ThirdPartyStoragePartitioning", "AvoidUnnecessaryBeforeUnloadCheckSync",
                     "DestroyProfileOnBrowserClose", "NetworkTimeServiceQuerying", "RenderDocument",
                     "ProactivelySwapBrowsingInstance", "SpareRendererForSitePerProcess")


def origin(url: str) -> str:
    """http://host:port of an address; "" of what is no web address."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            host = parts.hostname.encode("idna").decode()  # as Chromium spells it
            host = f"[{host}]" if ":" in host else host
            return f"{parts.scheme}://{host}:{parts.port or {'http': 80, 'https': 443}[parts.scheme]}"
    except ValueError:  # a port such as PORT, of an address in somebody's prose
        pass
    return ""


def sites_of(tasks: list[dict], allow: str = "") -> set[str] | None:
    """The origins of all addresses that stand in the tasks, and those of `allow`. None: no fence."""
    if allow == "all":
        return None
    # An address ends where JSON, a locator or a list (" |AND| ") goes on.
    found = re.findall(r"""(?i)https?://[^\s"'\\|,)]+""", json.dumps(tasks, ensure_ascii=False)) + allow.split(",")
    return set(filter(None, map(origin, found)))


# enter(browser, task): holds the storage state that an episode starts with. evaluate.World.enter, handed in.
Enter = Callable[["Browser", dict], contextlib.AbstractAsyncContextManager]


class Browser:
    """One Chromium process with a fresh context (cookies, storage, world) for every episode.

    sites: the origins it can reach (None: all). The fence is Chromium's resolver, which knows no other host and port:
    so it holds for redirects, frames, sockets and scripts alike, and costs nothing.
    """

    def __init__(self, settings: Settings, sites: set[str] | None = None, enter: Enter | None = None):
        self.settings, self.sites, self.enter = settings, sites, enter
        self.launching = asyncio.Lock()

    async def __aenter__(self):
        self.playwright = await async_playwright().start()
        try:
            self.chromium = await self.launch()
        except BaseException:
            await self.playwright.stop()
            raise
        return self

    async def launch(self):
        flags = ["--disable-dev-shm-usage", "--disable-gpu", "--num-raster-threads=1",
                 "--disable-features=" + ",".join(DISABLED_FEATURES)]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
        flags += ["--blink-settings=imagesEnabled=false", "--disable-remote-fonts"] if self.settings.text_only else []
        if self.sites is not None:
            reachable = [urlsplit(site).netloc for site in sorted(self.sites)]
            rules = [f"MAP {host} {host}" for host in reachable] + ["MAP * ~NOTFOUND"]  # the first that fits counts
            flags.append("--host-resolver-rules=" + ", ".join(rules))
            flags.append("--force-webrtc-ip-handling-policy=disable_non_proxied_udp")  # which resolves nothing
        return await self.playwright.chromium.launch(executable_path=find_chromium(self.playwright), args=flags)

    async def __aexit__(self, *_):
        with contextlib.suppress(PlaywrightError, EnvError):  # a Chromium that was killed cannot be closed
            await bounded(self.chromium.close(), self.settings.timeout, "closing Chromium")
        await self.playwright.stop()

    async def revive(self):
        if self.chromium.is_connected():  # without the lock, which a login may hold for long
            return
        async with self.launching:
            if not self.chromium.is_connected():  # it crashed or was killed; the episodes it took along are env errors
                self.chromium = await self.launch()

    async def open(self, task: dict, state: dict | str | None = None) -> "Session":
        """Starts an episode in a context and (sandbox tasks) a world of its own; of several start pages, at the first."""
        # The world travels as a header, not as a cookie, so that logging out does not change it.
        headers = {"X-World": f"{task['world']}-{uuid.uuid4().hex}"} if "world" in task else {}
        await self.revive()
        private = await self.chromium.new_context(
            viewport={"width": 1280, "height": 720}, extra_http_headers=headers, accept_downloads=False,
            storage_state=state or task.get("storage_state"), service_workers="block")
        private.set_default_timeout(1000 * self.settings.timeout)
        session = Session(private, self.settings, self.sites)
        try:
            await private.add_init_script(INIT)
            start_urls = task["start_url"].split(" |AND| ")
            for start_url in start_urls:
                await session.adopt(await private.new_page())
                if start_url is start_urls[-1]:  # tabs that open from now on are the pages' own
                    private.on("page", lambda page: session.spawn(session.adopt(page)))
                answer = await session.page.goto(start_url, wait_until="commit")
                await session.settle()  # one image that never comes does not keep the agent from the page
                if session.dead or session.page.is_closed():
                    raise EnvError(session.dead or "the start page is gone")
                if answer and answer.status >= 500:  # later on, the agent reads it: it may be what its own form led to
                    raise EnvError(f"the start page answered {answer.status}")
            if private.pages[0] is not session.page:
                session.page = private.pages[0]
                await session.page.bring_to_front()
        except BaseException:
            await session.close()
            raise
        return session


class Session:
    """One episode's window on the web: observe, execute, judge."""

    def __init__(self, context, settings: Settings, sites: set[str] | None):
        self.context, self.settings, self.sites = context, settings, sites
        self.page, self.devtools = None, {}     # the current tab; each tab's own line to the browser
        self.dead = ""                          # why the page is lost, once it is
        self.notes: list[str] = []              # dialogs and the like, told with the next observation
        self.refused = ""                       # an address outside the fence that the page tried to go to
        self.loading: set = set()               # frames with a navigation under way, and tabs about to open
        self.opening: deque = deque()           # those tabs: (address, a name of its own in `loading`)
        self.quiet = asyncio.Event()
        self.quiet.set()
        self.tasks: set = set()
        context.on("requestfailed", lambda request: self._failed(request))  # of a new tab, too, before it is adopted

    def spawn(self, coroutine):  # keeps a reference: asyncio alone would let the task be collected
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task):
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, PlaywrightError):
            self.dead = self.dead or repr(error)

    async def adopt(self, page):
        """Makes a tab the current one: the first, or one that a page opened."""
        self.page = page
        page.on("dialog", lambda dialog: self.spawn(self._answer(dialog)))
        page.on("crash", lambda _: setattr(self, "dead", "the page crashed"))
        page.on("close", lambda closed: self._closed(closed))
        page.on("download", lambda _: self.notes.append("a file was offered for download and not kept"))
        devtools = self.devtools[page] = await self.context.new_cdp_session(page)
        # The page's own process announces a navigation before it answers our next message, so `settle` knows by the
        # time of that answer whether an action started one. No polling, no guessing.
        here = lambda event: event["disposition"] == "currentTab"
        devtools.on("Page.frameRequestedNavigation", lambda e: self._loads(e["frameId"], here(e)))
        devtools.on("Page.frameStartedLoading", lambda e: self._loads(e["frameId"], True))
        devtools.on("Page.frameStoppedLoading", lambda e: self._loads(e["frameId"], False))
        devtools.on("Page.windowOpen", lambda e: self._opens(e["url"]))
        devtools.on("Page.frameDetached", lambda e: self._loads(e["frameId"], False))
        await devtools.send("Page.enable")
        if self.opening:
            url, name = self.opening.popleft()
            with contextlib.suppress(PlaywrightError):
                if url not in ("", "about:blank"):  # a tab begins empty, and counts as loaded then
                    await page.wait_for_url(lambda now: now != "about:blank", wait_until="commit")
                await page.wait_for_load_state("domcontentloaded")  # it may have opened before we listened to it
            self._loads(name, False)
        if page.is_closed():  # it was before we listened
            self._closed(page)

    def _loads(self, frame: str, started: bool):
        (self.loading.add if started else self.loading.discard)(frame)
        (self.quiet.clear if self.loading else self.quiet.set)()

    def _opens(self, url: str):
        name = f"new tab {uuid.uuid4().hex}"
        self.opening.append((url, name))
        self._loads(name, True)

    def _closed(self, page):
        others = [p for p in self.context.pages if p is not page]
        if page is self.page and others:
            self.page = others[-1]
        self.loading.clear()
        self.quiet.set()

    def _failed(self, request):
        if request.is_navigation_request() and self.sites is not None and origin(request.url) not in self.sites:
            with contextlib.suppress(PlaywrightError):  # a tab that is only opening has no frame yet
                if request.frame.parent_frame:  # the page that holds it stays
                    return
            self.refused = request.url

    async def _return(self):
        """Away from the error page that the fence leaves: back to the page before, or to the tab before."""
        self.notes.append(f"{self.refused[:200]} is not one of the task's sites and was not opened")
        self.refused = ""
        if not await self.page.evaluate("history.length > 1") and len(self.context.pages) > 1:
            await self.page.close()
        else:
            await self.page.go_back()

    async def _answer(self, dialog):
        message = " ".join(dialog.message[:200].split()).replace("<", "&lt;").replace(">", "&gt;")
        self.notes.append(f"the page showed a {dialog.type}: {message}")
        await dialog.accept(dialog.default_value)

    async def settle(self):
        """Returns when the navigations under way are over; one that takes too long is stopped, and the agent told."""
        async def wait():
            with contextlib.suppress(PlaywrightError):  # the page may be navigating away under the question
                # Browsers submit a form in a task of its own, after the click: by a task later the page has told of it.
                await self.page.evaluate(SETTLED)
            await self.quiet.wait()
        try:
            await bounded(wait(), self.settings.timeout, "loading")
        except EnvError:
            self.notes.append(f"the page did not finish loading within {self.settings.timeout:.0f} s and was stopped")
            with contextlib.suppress(PlaywrightError, EnvError):  # a page may be deaf to this, too
                if self.page in self.devtools:  # a tab that is only opening has no line yet
                    await bounded(self.devtools[self.page].send("Page.stopLoading"), 1, "stopping")
                if self.page.url in ("", "about:blank") and len(self.context.pages) > 1:  # a tab that nothing came to
                    await bounded(self.page.close(), 1, "closing")
            self.loading.clear()
            self.opening.clear()  # of a tab that was announced and never came
            self.quiet.set()

    async def observe(self) -> tuple[str, str]:
        """(url, simplified HTML) of the current page. Raises EnvError."""
        for attempt in range(3):  # a page may navigate by itself between two messages
            await self.settle()
            if self.dead or self.page.is_closed():
                raise EnvError(self.dead or "the page is gone")
            if self.page.url.startswith("chrome-error:") and self.refused:
                await self._return()
                continue
            if self.page.url.startswith("chrome-error:"):
                raise EnvError("the site did not answer")
            try:
                text = await bounded(self._read(), self.settings.timeout, "reading the page")
                break
            except PlaywrightError as error:
                if attempt == 2 or self.dead or "ontext was destroyed" not in str(error):
                    raise EnvError(first_line(error)) from None
        else:
            raise EnvError("the page leaves the task's sites whenever it is opened")
        notes = "".join(f"note: {note}{f' ({n} times)' * (n > 1)}\n" for note, n in Counter(self.notes).most_common(8))
        self.notes = []
        tabs = [page for page in self.context.pages if not page.is_closed()]
        if len(tabs) > 1 and self.page in tabs:
            notes += f"note: this is tab {tabs.index(self.page)} of {len(tabs)}, counted from 0\n"
        return self.page.url, readable(notes + text)

    async def _read(self) -> str:
        webrl = self.settings.observation == "webrl"
        arguments = [webrl, self.settings.viewport_only, self.settings.max_page_chars]
        return str(await self.ask(READ, arguments))

    async def ask(self, script: str, argument=None):
        """What a script of ours returns. A page may bend that, and what it is made of: nothing is certain but its end."""
        try:
            return await self.page.evaluate(script, argument)
        except (ValueError, TypeError, KeyError) as error:  # out of Playwright's reader
            raise EnvError(f"the page garbles what is read of it ({first_line(error)})") from None

    async def locate(self, element: str) -> tuple[float, float]:
        spot = await self.ask(LOCATE, int(element))
        if not isinstance(spot, dict) or not all(isinstance(spot.get(axis), (int, float)) for axis in "xy"):
            raise ActionError(str(isinstance(spot, dict) and spot.get("error") or f"element {element} cannot be found"))
        return spot["x"], spot["y"]

    async def execute(self, call: Call):
        """Carries an action out. Raises ActionError with what the agent should read."""
        try:
            await asyncio.wait_for(ACTIONS[call.name].run(self, call), self.settings.timeout)
        except asyncio.TimeoutError:  # its script may be in a loop; the next observation will tell
            raise ActionError(f"the page did not react to {call.name} within {self.settings.timeout:.0f} s") from None
        except PlaywrightError as error:  # the one place where the browser's complaints become the agent's
            if self.dead or self.page.is_closed() or not self.context.browser.is_connected():
                raise EnvError(self.dead or first_line(error)) from None
            raise ActionError(f"{call.name} failed: {first_line(error)}") from None

    async def close(self):
        for task in list(self.tasks):
            task.cancel()
        with contextlib.suppress(PlaywrightError, EnvError):
            await bounded(self.context.close(), self.settings.timeout, "closing")


# --------------------------------------------------------------------------------------------------------------------
# Episodes

# act(trajectory, slot) -> (action_ids, logps, ended): answers the trajectory's last turn. A model or a scripted expert.
Act = Callable[[Trajectory, int], Awaitable[tuple[list[int], list[float], bool]]]
Score = Callable[..., Awaitable[float]]  # score(task, answer, page, why): evaluate.score, handed in; it fills `why`


async def episode(browser: Browser, chat: Chat, task: dict, member: int, slot: int, act: Act,
                  score: Score) -> Trajectory:
    """Plays one task to its end and judges it once. Never raises for what the world or the agent does."""
    trajectory, settings = Trajectory(task, member), browser.settings
    async with contextlib.AsyncExitStack() as stack:
        try:
            await browser.revive()
            state = None
            if browser.enter:  # a reset of the sites takes its time
                state = await stack.enter_async_context(browser.enter(browser, task))
            session = await bounded(browser.open(task, state), 3 * settings.timeout, "opening the start page")
            stack.push_async_callback(session.close)
            if "intent_from" in task:  # MiniWoB++: the page makes its task up
                asked = bounded(session.ask(task["intent_from"]), settings.timeout, "reading the task")
                trajectory.task = task | {"intent": readable(await asked)}
            await take_turns(session, chat, trajectory, slot, act)
            await session.observe()  # what the last action began comes to its end; no blocked address is judged
            # The judge may open pages of its own; a model behind a URL may ask for patience.
            judging = score(trajectory.task, trajectory.answer, session.page, trajectory.checks)
            trajectory.reward = await bounded(judging, 10 * settings.timeout, "judging the episode")
        except (EnvError, PlaywrightError, ConnectionError) as problem:
            trajectory.status, trajectory.reward = "env_error", 0.0
            trajectory.checks = [["environment", False, first_line(problem)]]
    return trajectory


async def take_turns(session: Session, chat: Chat, trajectory: Trajectory, slot: int, act: Act):
    """Observes and acts until the agent exits, its turns are used up, or its history fills the context."""
    settings, error = session.settings, ""
    hosts = trajectory.task.get("hosts", {})  # the names that the policy knows the sites by
    while len(trajectory.turns) < settings.max_turns and trajectory.answer is None:
        url, page = await session.observe()
        page = f"error: {error}\n{page}" if error else page
        for host, address in hosts.items():
            page = page.replace(address, f"http://{host}")
        ids, shown, cut = fit_page(chat, trajectory, page, settings.max_context - settings.max_new_tokens)
        turn = Turn(url, shown, ids, [], [], "", page_cut=cut)
        trajectory.turns.append(turn)
        seen = context(chat, trajectory, len(trajectory.turns) - 1)
        if len(seen) + settings.max_new_tokens > settings.max_context:
            trajectory.turns.pop()  # it alone fills the context: the episode is over, like at the turn limit
            return
        turn.action_ids, turn.logps, turn.ended = await act(trajectory, slot)
        turn.response = chat.decode(turn.action_ids)
        error, said = "", turn.response
        for host, address in hosts.items():
            said = said.replace(f"http://{host}", address)
        try:
            call = parse(said)
            turn.action = str(call)
            if call.name == "exit":
                trajectory.answer = call.argument
            else:
                await session.execute(call)
        except ActionError as problem:
            turn.error = error = readable(problem)


def progress(done: list[Trajectory], total: int, workers: int, seconds: float) -> str:
    """How far, how fast, how well, and what the world did wrong: one line."""
    ok, turns = [tau for tau in done if tau.status == "ok"], [turn for tau in done for turn in tau.turns]
    faults = Counter(fault.split(" at http")[0] for tau in done for fault in
                     (tau.fault, "" if tau.status == "ok" else tau.checks[0][2]) if fault)
    tokens, running = sum(len(turn.action_ids) for turn in turns), min(workers, total - len(done))
    success = sum(tau.reward for tau in ok) / max(len(ok), 1)
    return (f"{len(done)}/{total} episodes, {running} running, {len(turns) / seconds:.1f} turns/s, "
            f"{tokens / seconds:.0f} tokens/s, success {success:.0%}, env errors {len(done) - len(ok)}"
            + "".join(f"; {count} x {fault}" for fault, count in faults.most_common()))


def recorded(chat: Chat, records: list[dict]) -> Act:
    """A policy that needs no model: it says again what lines of a trajectories.jsonl said, by task and member."""
    said = {(record["task_id"], record["member"]): replay(chat, record).turns for record in records}

    async def act(trajectory, slot):
        turns, t = said[trajectory.task["task_id"], trajectory.member], len(trajectory.turns) - 1
        return turns[t].action_ids if t < len(turns) else [chat.end_id], [], True
    return act


async def play(tasks: list[dict], act: Act, chat: Chat, score: Score, settings: Settings, group: int = 1,
               log: Callable[[str], None] | None = None, enter: Enter | None = None) -> list[Trajectory]:
    """Plays every task `group` times, settings.concurrency at once; returns them ordered by task, then member."""
    jobs = [(task, member) for task in tasks for member in range(group)]
    done: dict[int, Trajectory] = {}
    workers = min(settings.concurrency, len(jobs))
    rounds, queue = Rounds(workers), enumerate(jobs)
    start = said = time.monotonic()

    async def in_step(trajectory, slot):
        await rounds.turn()
        return await act(trajectory, slot)

    async def work(slot):
        nonlocal said
        # All workers draw from one queue, unless it must be the same one for the same episode in every run.
        for number, (task, member) in list(enumerate(jobs))[slot::workers] if settings.deterministic else queue:
            arguments = browser, chat, task, member, slot, in_step if settings.deterministic else act, score
            trajectory = await episode(*arguments)
            if trajectory.status != "ok":  # once more, in a fresh context: most faults of the world pass
                fault, trajectory = trajectory.checks[0][2], await episode(*arguments)
                trajectory.fault = fault
            done[number] = trajectory
            if log and (time.monotonic() - said > 5 or len(done) == len(jobs)):
                said = time.monotonic()
                log(progress(list(done.values()), len(jobs), workers, said - start))
        rounds.leave()

    async with Browser(settings, sites_of(tasks, settings.allow), enter) as browser:
        running = [asyncio.ensure_future(work(slot)) for slot in range(workers)]
        try:
            await asyncio.gather(*running)
        finally:
            for worker in running:
                worker.cancel()
    return [done[number] for number in range(len(jobs))]


class Rounds:
    """Lock-step: nobody takes a turn before everybody is ready to, so that every run batches the same episodes."""

    def __init__(self, workers: int):
        self.workers, self.held = workers, []

    async def turn(self):
        self.held.append(held := asyncio.get_running_loop().create_future())
        self._release_if_all_wait()
        await held

    def leave(self):
        self.workers -= 1
        self._release_if_all_wait()

    def _release_if_all_wait(self):
        if len(self.held) == self.workers:
            while self.held:
                self.held.pop().set_result(None)


# --------------------------------------------------------------------------------------------------------------------
# The engine: one model, many episodes


@dataclass
class Request:
    slot: int
    ids: list[int]             # the context, whole
    rng: random.Random         # this episode's own
    future: asyncio.Future
    out: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class Engine:
    """Continuous batching: prefill whoever arrives, then decode all who are running by one token, and again.

    Each episode owns a cache slot for its life. A new turn's context shares the history up to the last page with what
    the slot holds; the slot rolls back to the end of the common part and prefills the rest.
    """

    def __init__(self, model: Transformer, chat: Chat, settings: Settings, temperature=1.0, top_p=1.0):
        weight = model.model.embed_tokens.weight
        self.model, self.chat, self.settings, self.device = model, chat, settings, weight.device
        self.temperature, self.top_p = temperature, top_p
        self.cache = KVCache(model.config, settings.concurrency, settings.max_context + 1, weight.dtype, weight.device)
        recording = settings.cuda_graph and weight.device.type == "cuda"
        self.recorded = RecordedStep(model, self.cache) if recording else None
        self.held: list[list[int]] = [[] for _ in range(settings.concurrency)]  # ids whose keys and values a slot holds
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.arrived = asyncio.Event()

    async def respond(self, ids: list[int], slot: int, rng: random.Random) -> tuple[list[int], list[float], bool]:
        """Samples a response to the context `ids`; returns (ids, logps, whether it ended by itself)."""
        request = Request(slot, ids, rng, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self.arrived.set()
        await request.future
        return request.out, request.logps, request.out[-1:] == [self.chat.end_id]

    async def serve(self):
        """Runs until cancelled. Forward passes run beside the event loop, so that the browsers never wait for one."""
        def here(function, *arguments):
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # holds for one thread only, which begins on the first GPU
            return function(*arguments)

        async def beside(*work):
            forward = asyncio.get_running_loop().run_in_executor(None, here, *work)
            try:
                return await asyncio.shield(forward)
            finally:  # cancelled or not, when we leave nobody uses the weights: they may be resharded then
                await asyncio.wait([forward])

        try:
            while True:
                if not self.waiting and not self.running:
                    self.arrived.clear()
                    await self.arrived.wait()
                while self.waiting:
                    await beside(self.prefill, self.waiting[0])
                    self.running.append(self.waiting.popleft())
                for request in await beside(self.decode):
                    self.running.remove(request)
                    if not request.future.done():  # its episode may have been cancelled
                        request.future.set_result(None)
        except Exception as error:
            for request in [*self.waiting, *self.running]:
                if not request.future.done():
                    request.future.set_exception(error)
            raise

    @torch.no_grad()  # holds for one thread only, so it stands where the thread begins
    def prefill(self, request: Request, chunk: int = 2048):
        """Brings the slot to hold all of the context but its last token, which `decode` feeds."""
        held, ids = self.held[request.slot], request.ids
        same = len(os.path.commonprefix([held, ids]))
        for start in range(min(same, len(ids) - 1), len(ids) - 1, chunk):
            part = ids[start:min(start + chunk, len(ids) - 1)]
            positions = torch.arange(start, start + len(part), device=self.device)[None]
            self.model(torch.tensor([part], device=self.device), positions, self.cache,
                       slice(request.slot, request.slot + 1), head=lambda x_BTD: x_BTD[:, :0])
        self.held[request.slot] = ids[:-1]

    @torch.no_grad()
    def decode(self) -> list[Request]:
        """One token for every running request; returns those that are complete."""
        # A consecutive range of slots is a view of the cache; idle slots inside it write one unused position.
        slots = [r.slot for r in self.running] if self.recorded is None else range(self.cache.slots)
        low, rows = min(slots), slice(min(slots), max(slots) + 1)
        tokens, uniform = [[0]] * (rows.stop - low), [0.0] * (rows.stop - low)
        for r in self.running:
            tokens[r.slot - low] = [r.out[-1] if r.out else r.ids[-1]]
            uniform[r.slot - low] = r.rng.random()
        positions = [[len(held)] for held in self.held[rows]]
        tokens_B1, positions_B1 = (torch.tensor(column, device=self.device) for column in (tokens, positions))
        if self.recorded is None:
            logits_BV = self.model(tokens_B1, positions_B1, self.cache, rows,
                                   head=lambda x_BTD: self.model.logits(x_BTD[:, -1]))
        else:
            logits_BV = self.recorded(tokens_B1, positions_B1, max(positions)[0])
        uniform_B = torch.tensor(uniform, dtype=torch.float64, device=self.device)
        ids_B, logp_B = sample(logits_BV, uniform_B, self.temperature, self.top_p)
        ids, logps = ids_B.tolist(), logp_B.tolist()
        for r in self.running:
            self.held[r.slot] += tokens[r.slot - low]
            r.out.append(ids[r.slot - low])
            r.logps.append(logps[r.slot - low])
        return [r for r in self.running if r.out[-1] == self.chat.end_id or len(r.out) == self.settings.max_new_tokens]


async def rollout(model: Transformer, chat: Chat, tasks: list[dict], score: Score, settings: Settings, *,
                  group: int = 1, seed: int | str = 0, temperature: float = 1.0, top_p: float = 1.0,
                  log: Callable[[str], None] | None = None, enter: Enter | None = None) -> list[Trajectory]:
    """Plays every task `group` times with the model as policy. Random numbers depend on (seed, task, member) only."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # the other cores are the browser's: threads that wait cost more
    with unsharded(model) as whole:
        engine = Engine(whole, chat, settings, temperature, top_p)
        rngs: dict[int, random.Random] = {}

        async def act(trajectory: Trajectory, slot: int):
            if len(trajectory.turns) == 1:
                rngs[slot] = random.Random(f"{seed}/{trajectory.task['task_id']}/{trajectory.member}")
            return await engine.respond(context(chat, trajectory, len(trajectory.turns) - 1), slot, rngs[slot])

        server = asyncio.ensure_future(engine.serve())
        try:
            return await play(tasks, act, chat, score, settings, group, log, enter)
        finally:
            server.cancel()
            await asyncio.wait([server])
            torch.set_num_threads(threads)


