"""Everything that judges: task files, `score`, the benchmark loop, tables with intervals, the report.

    score(task, answer, page) = string_match(answer) * url_match(page.url) * program_html(page)      each 0 or 1

The factors are those that the task's "eval_types" names. One function is the training reward and the benchmark's
metric. Its semantics are VisualAgentBench's, the ones behind the paper's numbers (WebArena's own differ in places). On
purpose we differ from them where they pay for nothing, or cannot be trusted in training:

    - an episode that never exits has no answer: its answer is judged 0, also where "N/A" is the reference;
    - a missing element fails its check, whatever the check; a site that does not answer raises and voids the episode;
    - what the episode left open is judged first, then the pages to look at are opened in its place;
    - a helper function in a task file is looked up by name in a table; no text of a file is ever run as Python;
    - tasks that only a language model could judge (fuzzy_match) are left out and counted, never guessed.

    python evaluate.py --model runs/mgrpo --tasks sandbox:test,sandbox:test-unseen
    python evaluate.py --model runs/mgrpo --tasks test_webarena_lite.raw.json  # its sites: SHOPPING=http://... etc.
    python evaluate.py --validate test_webarena_lite.raw.json                  # what a task file holds, what is broken
    python evaluate.py --report --out runs/mgrpo                               # only write a run's report.html again
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must come before whatever imports torch

import argparse
import ast
import asyncio
import contextlib
import copy
import fcntl
import json
import math
import operator
import re
import socket
import subprocess
import sys
from collections import Counter, deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

import torch
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeout

import sandbox
from compress import Chat, Trajectory, open_chat
from model import Transformer, init_dist, load, load_tokenizer, parse_json, rank, read_json, writing
from rollout import EnvError, Settings, actions_help, rollout

# --------------------------------------------------------------------------------------------------------------------
# Task files: plain dicts in WebArena's JSON schema

SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "MAP", "WIKIPEDIA", "HOMEPAGE")  # WebArena's variables
PLACEHOLDER = re.compile(f"__({'|'.join(SITES)})__")
REQUIRED = {"task_id": (int, str), "sites": (list,), "intent": (str,), "start_url": (str,), "eval": (dict,)}
EVAL_TYPES = ("string_match", "url_match", "program_html")
INEQUALITY = re.compile(r"\s*(<=|>=|==|<|>)\s*(-?\d+(?:\.\d+)?)\s*")


def used_contents(spec: dict) -> list[tuple[str, dict]]:
    """[(field, reference_answers or required_contents)] as far as the eval_types use them."""
    types, targets = spec.get("eval_types"), spec.get("program_html")
    types = types if isinstance(types, list) else []
    targets = targets if "program_html" in types and isinstance(targets, list) else []
    return [("eval.reference_answers", spec.get("reference_answers"))] * ("string_match" in types) + \
        [(f"eval.program_html[{i}].required_contents", target.get("required_contents"))
         for i, target in enumerate(targets) if isinstance(target, dict)]


def mend(spec: dict) -> list[str]:
    """Brings an "eval" into uniform types, in place; returns what a person should know of it."""
    remarks = []
    for field, contents in used_contents(spec):
        for key, value in list(contents.items()) if isinstance(contents, dict) else []:
            if value is None:
                del contents[key]
            elif isinstance(value, list):
                contents[key] = [str(v) if isinstance(v, (int, float)) else v for v in value]
            elif key == "exact_match" and isinstance(value, (int, float)):
                contents[key] = str(value)
            elif isinstance(value, str) and key != "exact_match" and (key, value) != ("fuzzy_match", "N/A"):
                # Looked through like a list, a string would be a list of letters.
                contents[key] = [value]
                remarks.append(f"{field}.{key} is a bare string and was wrapped in a list")
    return remarks


def eval_faults(spec: dict):
    """Yields what makes a mended "eval" unusable: the field, what is wrong with it, the remedy."""
    types, targets = spec.get("eval_types"), spec.get("program_html")
    if not isinstance(types, list) or not types or not all(t in EVAL_TYPES for t in types):
        yield f"eval.eval_types is {types!r:.60}; make it a list of {', '.join(EVAL_TYPES)}"
        return
    if "url_match" in types:
        if not isinstance(spec.get("reference_url"), str) or not spec["reference_url"]:
            yield "eval.reference_url is empty; give the URL that the episode must end on"
        if spec.get("url_note") not in (None, "EXACT", "GOLD in PRED"):
            yield f'eval.url_note is {spec["url_note"]!r:.60}; use "EXACT" or "GOLD in PRED"'
    if "program_html" in types:
        if not isinstance(targets, list) or not targets or not all(isinstance(target, dict) for target in targets):
            yield "eval.program_html is not a list of objects; give url, locator and required_contents of each page"
            return
        for i, target in enumerate(targets):
            if not isinstance(target.get("url"), str) or not target["url"]:
                yield f'eval.program_html[{i}].url is missing; give an address, or "last" for where the episode ended'
            locator = target.get("locator")
            if not isinstance(locator, str) or not re.match(r"\s*$|document\.|\[\.\.\.document\.|func:", locator):
                yield f'eval.program_html[{i}].locator is {locator!r:.60}; use "" for the whole page, or JavaScript'
            for call in (target.get("url"), locator):
                if isinstance(call, str) and call.startswith("func:") and parse_helper(call) is None:
                    yield f"eval.program_html[{i}] calls {call!r:.60}; write func:NAME('ARGUMENT', ...)"
    for field, contents in used_contents(spec):
        if not isinstance(contents, dict) or not contents:
            yield f"{field} names nothing to check; give it one of {', '.join(MATCHERS)} or fuzzy_match"
            continue
        for key, value in contents.items():
            if key not in MATCHERS and key != "fuzzy_match":
                yield f"{field}.{key} is an unknown check; use one of {', '.join(MATCHERS)} or fuzzy_match"
            elif key == "exact_match" and not isinstance(value, str):
                yield f"{field}.exact_match is {value!r:.60}; make it a string"
            elif not isinstance(value, (str, list)) or not value or not all(isinstance(v, str) and v for v in value):
                yield f"{field}.{key} is {value!r:.60}; make it a list of non-empty strings"
            elif key == "required_values" and not all(map(INEQUALITY.fullmatch, " |OR| ".join(value).split(" |OR| "))):
                yield f'{field}.required_values is {value!r:.60}; write an operator and a number, like "<= 700"'


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
    if isinstance(task.get("eval"), dict):
        remarks = mend(task["eval"])
        faults += eval_faults(task["eval"])
    return task, remarks, faults


def read_tasks(path: str) -> tuple[list[dict], list[str], list[str]]:
    """A task file -> (usable tasks, remarks, faults), each remark and fault naming its row."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the task file {path} ({error.strerror}); give a JSON file in WebArena's format, "
                         "or sandbox:train, sandbox:test, sandbox:test-unseen.") from None
    rows = parse_json(text, f"the task file {path}", object)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"the task file {path} holds no list of tasks; make it a JSON list of objects.")
    tasks, remarks, faults = [], [], []
    for i, row in enumerate(rows):
        task, mended, broken = check_row(row)
        ids = [f"{key} {task[key]!s:.40}" for key in ("task_id", "old_task_id") if key in task]
        where = f"row {i}" + (f" ({', '.join(ids)})" if ids else "")
        remarks += [f"{where}: {text}" for text in mended]
        faults += [f"{where}: {text}" for text in broken]
        tasks += [] if broken else [task]
    return tasks, remarks, faults


def needs_judge(task: dict) -> bool:
    """Whether only a language model could judge it."""
    return any("fuzzy_match" in contents for _, contents in used_contents(task["eval"]))


def missing_helper(task: dict) -> str:
    """Name of a `func:` helper that the task needs and that is not in HELPERS, else ""."""
    targets = task["eval"]["program_html"] if "program_html" in task["eval"]["eval_types"] else []
    calls = [text for target in targets for text in (target["url"], target["locator"]) if text.startswith("func:")]
    return next((name for name, _ in map(parse_helper, calls) if name not in HELPERS), "")


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


@contextlib.contextmanager
def open_sites(spec: str):
    """Yields {SITE: address}: the sandbox's, started for the length of the block, or those of the environment."""
    sites = {name: os.environ[name] for name in SITES if os.environ.get(name)}
    if not any(part.startswith("sandbox") for part in spec.split(",")):
        yield sites
        return
    try:
        with sandbox.start() as started:
            yield sites | started
    except RuntimeError as error:
        if "sandbox did not start" not in str(error):
            raise
        raise ValueError(f"{error}.") from None


def check_world(tasks: list[dict]):
    """Raises one sentence if a start page's server does not answer or a login file is missing."""
    origins = {}
    for task in tasks:
        origins |= {urlsplit(url).netloc: (url, task) for url in task["start_url"].split(" |AND| ")}
        state = task.get("storage_state")
        if isinstance(state, str) and not Path(state).exists():
            raise ValueError(f"task {task['task_id']} starts logged in through {state}, which does not exist; write it "
                             "with the benchmark's auto_login.py, or set storage_state to null.")
    for url, task in origins.values():
        parts = urlsplit(url)
        try:
            address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, timeout=10).close()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"cannot reach {url}, where task {task['task_id']} starts ({error}); start the site, or "
                             "correct its variable or start_url.") from None


def load_tasks(spec: str, sites: dict[str, str], reach: bool = True) -> list[dict]:
    """Tasks ready to play: "sandbox:SPLIT[:N]", a task file, or several of these with commas between.

    Tasks that we cannot judge are left out, and it is said how many. reach: also make sure that their sites answer.
    """
    log = print if rank() == 0 else (lambda *_: None)
    tasks = []
    for part in spec.split(","):
        if part.startswith("sandbox"):
            found = re.fullmatch(r"sandbox:([a-z-]+)(?::(\d+))?", part)
            if not found:
                raise ValueError(f"--tasks {part}: write sandbox:SPLIT or sandbox:SPLIT:N, such as sandbox:test:50.")
            tasks += sandbox.tasks(found[1], found[2] and int(found[2]))
            continue
        rows, remarks, faults = read_tasks(part)
        if faults:
            raise ValueError(f"the task file {part} has {len(faults)} faults, the first in {faults[0]} "
                             f"(python evaluate.py --validate {part} lists all).")
        for remark in remarks:
            log(f"{part}, {remark}")
        judged = sum(map(needs_judge, rows))
        usable = [task for task in rows if not needs_judge(task) and not missing_helper(task)]
        if len(usable) < len(rows):
            log(f"{part}: left out {judged} tasks that need a language model as judge and "
                f"{len(rows) - judged - len(usable)} that need a helper we lack; {len(usable)} of {len(rows)} remain")
        tasks += usable
    if not tasks:
        raise ValueError(f"--tasks {spec} leaves no task to play; choose another split or file.")
    tasks = site_urls(tasks, sites)
    if reach:
        check_world(tasks)
    return tasks


def validate(path: str) -> int:
    """Prints what a task file holds and what is broken in it; returns the exit status."""
    tasks, remarks, faults = read_tasks(path)
    strings = [t["eval"]["reference_answers"] for t in tasks if "string_match" in t["eval"]["eval_types"]]
    targets = [p for t in tasks if "program_html" in t["eval"]["eval_types"] for p in t["eval"]["program_html"]]
    na = sum(any(v in ("N/A", ["N/A"]) for v in contents.values()) for contents in strings)
    judged = sum(map(needs_judge, tasks))
    helpers = Counter(filter(None, map(missing_helper, tasks)))
    counts = {"evaluators": Counter(" + ".join(t["eval"]["eval_types"]) for t in tasks),
              "answers by": Counter(" + ".join(sorted(contents)) for contents in strings),
              "pages by": Counter(key for p in targets for key in p["required_contents"]),
              "sites": Counter(" + ".join(map(str, t["sites"])) for t in tasks)}
    print(f"{path}: {len(tasks)} usable tasks, {len({fault.split(':')[0] for fault in faults})} broken rows")
    for title, counter in counts.items():
        print(f"  {title:<12}" + ", ".join(f"{name} {n}" for name, n in counter.most_common()))
    print(f"  {judged} tasks need an LLM judge, {len(tasks) - judged} do not; {na} have the reference N/A")
    if helpers:
        print("  helpers we lack: " + ", ".join(f"{name} ({n} tasks)" for name, n in helpers.items()))
    shown = [f"mended  {text}" for text in remarks] + [f"BROKEN  {text}" for text in faults]
    for line in shown[:50]:
        print(f"  {line}")
    if len(shown) > 50:
        print(f"  ... and {len(shown) - 50} more")
    return 1 if faults else 0


# --------------------------------------------------------------------------------------------------------------------
# Evaluators

# Where nltk's word_tokenize, which the benchmark's numbers rest on, puts its cuts. Simplified: a full stop before a
# space is always cut off, where nltk first decides whether it ends an abbreviation.
CUTS = re.compile(r"""\.{2,} | -- | [][(){}<>;@#$%&?!*"`“”‘’«»„–—] | [:,](?!\d) | \.(?=[])}>"'”’»]*(?:\s|$))
                      | (?<=\w)(?:n't|'(?:s|m|d|ll|re|ve))(?!\w) | (?<!\w)' | '(?!\w)""", re.VERBOSE)


def words(text: str) -> list[str]:
    return CUTS.sub(r" \g<0> ", text).split()


def clean(text: str) -> str:
    """Lower case, without one pair of quotes around it. VisualAgentBench does not strip spaces, so neither do we."""
    quoted = any(text.startswith(quote) and text.endswith(quote) for quote in "'\"")
    return (text[1:-1] if quoted else text).lower()


def includes(ref: str, text: str) -> bool:
    """Whether ref is in text: as a word if it is a single word (so 170 is not in 000000170), else as a substring."""
    ref, text = clean(ref), clean(text)
    if len(words(ref)) != 1:
        return ref in text
    return words(ref)[0] in {part for word in words(text) for part in (word, *word.split("/"))}


OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": math.isclose, "<": operator.lt, ">": operator.gt}


def satisfies(text: str, inequality: str) -> bool:
    """Whether a number, thousands separators allowed, satisfies something like "<= 700"."""
    sign, bound = INEQUALITY.fullmatch(inequality).groups()
    try:
        return OPERATORS[sign](float(text.strip().replace(",", "")), float(bound))
    except ValueError:
        return False


MATCHERS = {  # check -> (reference, text) -> passed. Every reference of a list must pass; of one_of's, one
    "exact_match": lambda ref, text: clean(text) == clean(ref),
    "must_include": lambda ref, text: any(includes(r, text) for r in ref.split(" |OR| ")),
    "must_exclude": lambda ref, text: not includes(ref, text),
    "one_of": lambda ref, text: clean(ref) in clean(text),
    "required_values": lambda ref, text: any(satisfies(text, r) for r in ref.split(" |OR| ")),
}


def contents_checks(contents: dict, text: str | None, subject: str) -> list[tuple]:
    """Every check of `contents` on a text, as [(name, passed, detail)]. None, a text that is not there, fails them."""
    checks = []
    seen = f"there is no {subject}" if text is None else f"the {subject} is “{' '.join(text.split())[:200]}”"
    for kind, refs in contents.items():
        if kind not in MATCHERS:
            raise ValueError(f"{kind} needs a language model as judge; leave this task out (needs_judge).")
        refs = [str(refs)] if not isinstance(refs, list) else [str(ref) for ref in refs]
        passed = [text is not None and MATCHERS[kind](ref, text) for ref in refs]
        if kind == "one_of":
            refs, passed = [" |OR| ".join(refs)], [any(passed)]
        checks += [(f"{kind} “{ref}”", ok, seen) for ref, ok in zip(refs, passed)]
    return checks


def answer_checks(answer: str | None, reference_answers: dict) -> list[tuple]:
    # Cleaned here and again by the matchers, as the original does: two layers of quotes come off.
    return contents_checks(reference_answers, None if answer is None else clean(str(answer)), "answer")


def string_match(answer: str | None, reference_answers: dict) -> bool:
    """Judges an answer; None (the episode never exited) fails. Raises ValueError where a language model is needed."""
    return all(passed for _, passed, _ in answer_checks(answer, reference_answers))


def url_match(url: str, reference_url: str, url_note: str | None = None) -> bool:
    """EXACT, the default: equal up to localhost and a trailing slash. GOLD in PRED: a reference is part of the URL."""
    def tidy(text):
        return text.replace("localhost", "127.0.0.1").removesuffix("/")
    references = [tidy(reference) for reference in reference_url.split(" |OR| ")]
    if url_note == "GOLD in PRED":
        return any(reference in tidy(url) for reference in references)
    if url_note not in (None, "EXACT"):
        raise ValueError(f'url_note {url_note!r}: use "EXACT" or "GOLD in PRED".')
    return tidy(url) in references


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


HELPERS = {f.__name__: f for f in (reddit_get_post_url, gitlab_get_project_memeber_role)}


def parse_helper(text: str) -> tuple[str, list] | None:
    """'func:name(__page__, "x")' -> (name, ["x"]); None if it is no such call. The page is handed over anyway."""
    found = re.fullmatch(r"func:(\w+)\((.*)\)\s*", text, re.DOTALL)
    try:
        return found and (found[1], ast.literal_eval(f"[{re.sub('__page__ *,? *', '', found[2])}]"))
    except (ValueError, SyntaxError):
        return None


async def call_helper(text: str, page, last_url: str) -> str:
    name, arguments = parse_helper(text) or (text, [])
    if name not in HELPERS:
        raise ValueError(f"the helper {name} is not available; leave this task out (missing_helper).")
    return await HELPERS[name](page, *[last_url if argument == "__last_url__" else argument for argument in arguments])


async def evaluate_js(page, expression: str) -> str | None:
    """The value of an expression as text, None if it throws or is null: the element is missing. A dead page raises."""
    try:
        value = await page.evaluate(f"() => {{ try {{ return {expression}\n}} catch {{ return null }} }}")
    except PlaywrightError as error:
        if "SyntaxError" in str(error):
            return None
        raise
    return None if value is None else str(value)


async def select(page, target: dict, last_url: str) -> str | None:
    """The text a program_html target speaks of."""
    locator = target["locator"].strip()
    if not locator:
        return await page.content()
    if locator.startswith("func:"):
        return await call_helper(locator, page, last_url)
    for action in target.get("prep_actions") or []:  # clicks that unfold what the locator reads
        await evaluate_js(page, action)
    return await evaluate_js(page, locator)


async def visit(page, url: str):
    """Opens what a program_html target speaks of. Raises if the site does not answer: that says nothing about the policy."""
    response = await page.goto(url, wait_until="load")
    if response and response.status >= 500:
        raise EnvError(f"{url} answered {response.status} while the episode was judged")
    if await page.evaluate("document.scripts.length"):  # the page may still be building itself
        with contextlib.suppress(PlaywrightTimeout):
            await page.wait_for_load_state("networkidle", timeout=10_000)


async def html_checks(target: dict, page, last: str) -> list[tuple]:
    """One program_html target; `last` is the address the episode ended on."""
    url = target["url"]
    if url.startswith("func:"):
        url = await call_helper(url, page, last)
    if url != "last":
        await visit(page, url)
    text = await select(page, target, last)
    where = f"{target['locator'].strip() or 'page'} of {last if url == 'last' else url}"
    return contents_checks(target["required_contents"], text, where)


async def checks(task: dict, answer: str | None, page) -> list[tuple]:
    """Everything the task's reward hangs on, as [(name, passed, detail)]. `page` is where the episode ended; other pages
    are then opened in it, as in WebArena: a tab of its own would cost three times the CPU.

    Raises PlaywrightError or EnvError if a site does not answer: that says nothing about the policy.
    """
    spec, out, last = task["eval"], [], page.url
    if "string_match" in spec["eval_types"]:
        out += answer_checks(answer, spec["reference_answers"])
    if "url_match" in spec["eval_types"]:
        note, reference = spec.get("url_note"), spec["reference_url"]
        out.append((f"url_match {note or 'EXACT'} “{reference}”", url_match(page.url, reference, note),
                    f"the episode ended on {page.url}"))
    if "program_html" in spec["eval_types"]:
        for target in sorted(spec["program_html"], key=lambda target: target["url"] != "last"):  # while it is still open
            out += await html_checks(target, page, last)
    if not out:
        raise ValueError(f"task {task['task_id']} checks nothing (eval_types {spec['eval_types']}); see --validate.")
    return out


async def score(task: dict, answer: str | None, page, why: list | None = None) -> float:
    """The reward: 1.0 if every check passes, else 0.0. `why`, if given, receives the checks."""
    made = await checks(task, answer, page)
    if why is not None:
        why += made
    return float(all(passed for _, passed, _ in made))


# --------------------------------------------------------------------------------------------------------------------
# The benchmark: episodes, figures, tables


async def evaluate(model: Transformer, chat: Chat, tasks: list[dict], settings: Settings, *, temperature: float = 0.0,
                   seed: int = 0, log=None) -> list[Trajectory]:
    """Plays each task once, greedily by default."""
    return await rollout(model, chat, tasks, score, settings, seed=seed, temperature=temperature, log=log)


def wilson(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95% interval of a success rate; unlike the normal one it is right near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p, zz = successes / n, z * z / n
    middle, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / n / 4)
    return max(0.0, (middle - half) / (1 + zz)), min(1.0, (middle + half) / (1 + zz))


def rate(trajectories: list[Trajectory]) -> dict:
    """Success rate with its interval. Episodes that the environment broke say nothing and do not count."""
    rewards = [t.reward for t in trajectories if t.status == "ok"]
    wins, n = sum(rewards), len(rewards)
    return {"success_rate": wins / max(n, 1), "ci95": list(wilson(wins, n)), "n": n}


def summarize(trajectories: list[Trajectory]) -> dict:
    """The figures of summary.json. turns and tokens are means; truncated and invalid_actions count responses."""
    ok = [t for t in trajectories if t.status == "ok"]
    turns = [turn for t in ok for turn in t.turns]
    sites, templates = {}, {}
    for t in trajectories:
        sites.setdefault(" + ".join(t.task["sites"]), []).append(t)
        templates.setdefault(str(t.task.get("intent_template_id")), []).append(t)
    return {**rate(trajectories), "episodes": len(trajectories), "env_errors": len(trajectories) - len(ok),
            "turns": len(turns) / max(len(ok), 1),
            "response_tokens": sum(len(turn.action_ids) for turn in turns) / max(len(turns), 1),
            "exited": sum(t.answer is not None for t in ok) / max(len(ok), 1),
            "truncated": sum(not turn.ended for turn in turns),
            "invalid_actions": sum(bool(turn.error) and not turn.action for turn in turns),
            "per_site": {name: rate(group) for name, group in sorted(sites.items())},
            "per_template": {name: {"template": group[0].task.get("intent_template", "")} | rate(group)
                             for name, group in templates.items()}}


def table(rows: list[tuple[str, dict]]) -> str:
    """[(name, figures of `summarize` or `rate`)] as plain text."""
    cells = [["", "success", "95% interval", "n", "turns", "env errors"]]
    for name, s in rows:
        low, high = s["ci95"]
        cells.append([name, f"{s['success_rate']:.1%}", f"{low:.1%} to {high:.1%}", str(s["n"]),
                      f"{s['turns']:.1f}" if "turns" in s else "", str(s.get("env_errors", ""))])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells)


# --------------------------------------------------------------------------------------------------------------------
# What a run leaves behind


class Run:
    """A run's directory. Only rank 0 writes."""

    def __init__(self, path: str | Path, config: dict):
        self.path, self.config = Path(path), config

    def claim(self):
        """The directory is ours until this process ends, however it ends: two runs in one would spoil each other."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a+")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.lock.seek(0)
                raise ValueError(f"{self.path} is in use by process {self.lock.read()}; wait for it, stop it, or give "
                                 "another --out.") from None
            self.lock.truncate(0)
            self.lock.write(str(os.getpid()))
            self.lock.flush()

    def _append(self, name: str, rows: list[dict]):
        if rank() == 0 and rows:
            with writing(self.path / name), open(self.path / name, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    def write(self, row: dict):
        finite = lambda value: not isinstance(value, float) or math.isfinite(value)  # JSON knows no NaN
        self._append("metrics.jsonl", [{key: value if finite(value) else None for key, value in row.items()}])

    def write_trajectories(self, records: list[dict]):
        self._append("trajectories.jsonl", records)


def describe_run(cfg, device) -> dict:
    """The resolved configuration and what else is needed to repeat the run."""
    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""
    try:
        commit = git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except OSError:  # no git here
        commit = ""
    cuda = torch.device(device).type == "cuda"
    return {"script": Path(sys.argv[0]).name, **asdict(cfg), "commit": commit, "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if cuda else f"cpu, {torch.get_num_threads()} threads"}


def start_run(cfg, device, model_config: dict | None = None, first: int = 0) -> Run:
    """Begins runs/NAME, or goes on with it at step `first`: what is on record of later steps is dropped. Tells its config."""
    run = Run(cfg.out, describe_run(cfg, device))
    if rank() == 0:
        run.claim()
        with writing(run.path):
            for name in ("metrics.jsonl", "trajectories.jsonl"):
                keep_steps_below(run.path / name, first)
            temporary = run.path / "config.tmp"
            temporary.write_text(json.dumps((model_config or {}) | {"run": run.config}, indent=2) + "\n")
            temporary.replace(run.path / "config.json")
        print("config: " + ", ".join(f"{key} {value}" for key, value in run.config.items()))
    return run


def keep_steps_below(path: Path, first: int):
    """Rewrites a .jsonl file without the rows of step `first` and later, and without a last line that was cut off."""
    if path.exists():
        shorter = path.with_suffix(".tmp")
        with open(path, "rb") as old, open(shorter, "wb") as new:
            for number, line in enumerate(old if first else (), 1):
                try:
                    if line.endswith(b"\n") and (json.loads(line).get("step") or 0) < first:
                        new.write(line)
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: not a row of a run ({error}); remove it.") from None
        shorter.replace(path)


def newest(path: Path, count: int, size: int) -> tuple[list[dict], int]:
    """The last rows of a .jsonl file, at most `count` and about `size` characters; and how many were left out."""
    lines, total = deque(), 0
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                lines.append(line)
                total += 1
                size -= len(line)
                while len(lines) > count or (size < 0 and len(lines) > 1):
                    size += len(lines.popleft())
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line of a run that is being written, or was cut off
            rows.append(parse_json(line, path))
    return rows, total - len(rows)


def report(run_dir: str | Path) -> Path:
    """Writes run_dir/report.html from what the run left behind: one file, no network. Returns its path."""
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"there is no run at {run_dir}; give --out the directory of a run.")
    trajectories, left_out = newest(run_dir / "trajectories.jsonl", 2000, 40_000_000)
    metrics, _ = newest(run_dir / "metrics.jsonl", 100_000, 40_000_000)
    config = read_json(run_dir / "config.json") if (run_dir / "config.json").exists() else {}
    summaries = [read_json(path) for path in sorted(run_dir.glob("summary*.json"))]
    data = {"name": run_dir.name, "config": config.get("run", {}), "metrics": metrics, "trajectories": trajectories,
            "left_out": left_out, "summaries": summaries}
    template = (Path(__file__).parent / "assets" / "report.html").read_text(encoding="utf-8")
    # Page text is hostile: without a "<" in the data, nothing in it can close the script element that holds it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path = run_dir / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(template.replace("/*DATA*/", text), encoding="utf-8")
    temporary.replace(path)
    return path


def compare(runs: list[str]) -> str:
    """The evaluations of several runs in one table, split by split, and the path of the last one's report."""
    rows = []
    for run in map(Path, runs):
        if not (run / "summary.json").exists():
            raise ValueError(f"{run / 'summary.json'} does not exist; evaluate that run first.")
        summary = read_json(run / "summary.json")
        try:
            figures = [(f"{split}  {run.name}", s) for split, s in summary["splits"].items()]
            table(figures)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"{run / 'summary.json'} is no summary ({error!r:.100}); evaluate that run again.") from None
        rows += figures
    return f"{table(sorted(rows, key=lambda row: row[0].split()[0]))}\nreport: {report(run)}"


# --------------------------------------------------------------------------------------------------------------------
# The script


@dataclass
class Config(Settings):
    # What to do
    model: str = "runs/mgrpo"     # checkpoint directory or hub id
    tasks: str = "sandbox:test"   # sandbox:SPLIT[:N] or task files in WebArena's JSON format, commas between several
    out: str = "runs/eval"        # where summary.json, trajectories.jsonl and report.html go; a training run's is fine
    validate: str = ""            # only say what this task file holds and what is broken in it
    report: bool = False          # only write the report of --out again
    compare: str = ""             # only print the evaluations that these runs hold (commas between) in one table
    # How to play. A checkpoint remembers the sizes it was trained with; they replace these defaults.
    temperature: float = 0.0      # 0: greedy
    seed: int = 0                 # of sampling, at a temperature above 0
    max_turns: int = 10
    max_new_tokens: int = 64
    max_context: int = 1536


def keep_other_splits(path: Path, splits: list[str]):
    """Drops an earlier evaluation's trajectories of the same splits."""
    if path.exists():
        temporary = path.with_suffix(".tmp")
        with open(path, encoding="utf-8") as old, open(temporary, "w", encoding="utf-8") as new:
            new.writelines(line for i, line in enumerate(old, 1)
                           if parse_json(line, f"{path}, line {i}").get("split") not in splits)
        temporary.replace(path)


def main(cfg: Config):
    if cfg.validate:
        sys.exit(validate(cfg.validate))
    if cfg.report or cfg.compare:
        print(report(cfg.out) if cfg.report else compare(cfg.compare.split(",")))
        return
    device = init_dist()
    chat = open_chat(load_tokenizer(cfg.model), cfg.model, actions_help())
    model = load(cfg.model, torch.float32, device)
    run, splits, rows, everything = Run(cfg.out, describe_run(cfg, device)), {}, [], []
    run.claim()
    keep_other_splits(run.path / "trajectories.jsonl", cfg.tasks.split(","))
    with open_sites(cfg.tasks) as sites:
        for split in cfg.tasks.split(","):
            trajectories = asyncio.run(evaluate(model, chat, load_tasks(split, sites), cfg, temperature=cfg.temperature,
                                                seed=cfg.seed, log=lambda line: print(f"{split}: {line}", flush=True)))
            if all(t.status != "ok" for t in trajectories):
                raise ValueError(f"the environment broke all {len(trajectories)} episodes, the first with "
                                 f"{trajectories[0].checks or 'no word'}; check that the sites work in a browser.")
            run.write_trajectories([t.record(chat, step=None, split=split) for t in trajectories])
            splits[split] = summarize(trajectories)
            rows += [(split, splits[split])] + [(f"  {site}", r) for site, r in splits[split]["per_site"].items()]
            everything += trajectories
    config = run.path / "config.json"
    if not config.exists() or "model_type" not in read_json(config):  # a training run keeps its own
        config.write_text(json.dumps({"run": run.config}, indent=2) + "\n")
    summary = summarize(everything) | {"run": run.config, "splits": splits}
    (run.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(table(rows))
    print(f"report: {report(run.path)}")


def parse_args() -> Config:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, **kind)
    checkpoint = Path(parser.parse_known_args()[0].model) / "config.json"
    trained = read_json(checkpoint).get("run") if checkpoint.exists() else None
    for name in ("max_turns", "max_new_tokens", "max_context", "observation", "viewport_only"):
        if isinstance(trained, dict) and type(trained.get(name)) is type(getattr(Config, name)):
            parser.set_defaults(**{name: trained[name]})
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    try:
        main(parse_args())
    except ValueError as error:
        sys.exit(f"evaluate.py: {error}")
