"""Everything that judges: evaluators, `score`, the benchmark loop, figures, and what a run leaves.

    score(task, answer, page) = string_match(answer) * url_match(page.url) * program_html(page)

Each factor is 0 or 1, and the task's "eval_types" says which ones count. This one function is the
training reward and the benchmark's metric. It follows VisualAgentBench, which produced the paper's
numbers (WebArena's own evaluators differ in places). We differ from it on purpose:

    - An episode that never exits has no answer. Every check of its answer fails, even where
      the reference is "N/A".
    - A missing element fails its check. A site that does not answer raises: the episode is void.
    - The page that the episode left open is judged first; other pages are then opened in its tab.
    - Pages are read once they settle. If a check fails, the page is read again once its requests
      are answered (or 3 s pass) and it is unchanged for a second. The benchmark waits 3 s.
    - All kinds of checks in a page's required_contents count. The benchmark tests only one.
    - A helper function in a task file is looked up in a table. No text of a file runs as Python.
    - The judge's verdict (fuzzy_match) is the last line of its reply. Without --judge-url the tasks
      that need a judge are left out and counted.

    python evaluate.py --model runs/mgrpo --tasks sandbox:test,sandbox:test-unseen
    torchrun --nproc_per_node 8 evaluate.py --model runs/mgrpo --tasks test.json  # SHOPPING=http://...
    python evaluate.py --policy-url https://api.openai.com/v1 --policy-model o4-mini --temperature 1
    python evaluate.py --validate test.json        # what a task file holds, what is broken in it
    python evaluate.py --model runs/mgrpo --tasks sandbox:test:1 --watch   # in a window
    python evaluate.py --report --out runs/mgrpo   # only write a run's report.html again
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; before torch is imported

import argparse
import asyncio
import contextlib
import fcntl
import inspect
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from playwright.async_api import Error as PlaywrightError

from compress import Chat, Trajectory, messages, open_chat, system_prompt
from model import (Transformer, all_max, computing_dtype, gather, init_dist, load, load_tokenizer,
                   load_training, rank, read_json, reading, world_size, writing)
from rollout import (CALL, ActionError, Browser, EnvError, Settings, actions_help, first_line, parse,
                     play, readable, rollout)
from worlds import load_tasks, open_sites, sources, webarena
from worlds.endpoint import Endpoint, Judge
from worlds.onlooker import Onlooker, embed, ticker
from worlds.webarena import INEQUALITY, call_helper, needs_judge
from worlds.words import words

ASSETS = Path(__file__).parent / "assets"

# --------------------------------------------------------------------------------------- evaluators


def clean(text: str) -> str:
    """Lower case, without one pair of quotes around it. Keeps spaces, as VisualAgentBench does."""
    quoted = any(text.startswith(quote) and text.endswith(quote) for quote in "'\"")
    return (text[1:-1] if quoted else text).lower()


def includes(ref: str, text: str, parts=True) -> bool:
    """Whether ref is in text: as a word if it is one (no 170 in 000000170), else as a substring.

    parts: a word may also be a part of what stands between slashes (170/171).
    """
    ref, text = clean(ref), clean(text)
    if len(words(ref)) != 1:
        return ref in text
    found = words(text)
    return ref in found or parts and any(ref in word.split("/") for word in found)


def satisfies(text: str, inequality: str) -> bool:
    """Whether an integer, thousands separators allowed, satisfies something like "<= 700"."""
    sign, bound = INEQUALITY.fullmatch(inequality).groups()
    try:
        number, bound = int(text.replace(",", "")), float(bound)
    except ValueError:
        return False
    # The benchmark tolerates 1e-8, so that < and > take equal numbers as well.
    return {"<": number <= bound, ">": number >= bound, "=": number == bound}[sign[0]]


MATCHERS = {  # check -> (reference, text) -> passed. All of a list must pass; one_of needs one
    "exact_match": lambda ref, text: clean(text) == clean(ref),
    "must_include": lambda ref, text: any(includes(r, text) for r in ref.split(" |OR| ")),
    "must_exclude": lambda ref, text: not includes(ref, text, parts=False),
    "one_of": lambda ref, text: clean(ref) in clean(text),
    "required_values": lambda ref, text: any(satisfies(text, r) for r in ref.split(" |OR| ")),
}


def contents_checks(contents: dict, text: str | None, subject: str) -> list[tuple]:
    """Every check of `contents` on a text, as [(name, passed, detail)]. No text fails all."""
    seen = f"there is no {subject}"
    if text is not None:
        seen = f"the {subject} is “{' '.join(text.split())[:200]}”"
    checks = []
    for kind, refs in contents.items():
        if kind not in MATCHERS:
            raise ValueError(f"{kind} needs a language model as judge; give --judge-url.")
        refs = [str(ref) for ref in (refs if isinstance(refs, list) else [refs])]
        passed = [text is not None and MATCHERS[kind](ref, text) for ref in refs]
        if kind == "one_of":
            refs, passed = [" |OR| ".join(refs)], [any(passed)]
        checks += [(f"{kind} “{ref}”", ok, seen) for ref, ok in zip(refs, passed)]
    return checks


async def judged_checks(task, contents: dict, text: str | None, subject: str, judge) -> list[tuple]:
    """`contents_checks`, and fuzzy_match by the judge if there is one."""
    if judge is None or "fuzzy_match" not in contents:
        return contents_checks(contents, text, subject)
    refs, passed, detail = contents["fuzzy_match"], False, f"there is no {subject}"
    if text is not None:
        passed, detail = await judge(task, refs, text)
    rules = {kind: value for kind, value in contents.items() if kind != "fuzzy_match"}
    return contents_checks(rules, text, subject) + [(f"fuzzy_match “{refs}”", passed, detail)]


def string_match(answer: str | None, reference_answers: dict) -> bool:
    """Judges an answer; None (the episode never exited) fails. ValueError if it takes a judge."""
    # The matchers clean once more, as in the original: two layers of quotes come off.
    text = None if answer is None else clean(str(answer))
    return all(passed for _, passed, _ in contents_checks(reference_answers, text, "answer"))


def url_match(url: str, reference_url: str, url_note: str | None = None) -> bool:
    """EXACT, the default: equal up to localhost and a trailing slash. GOLD in PRED: contains it."""
    def tidy(text):
        return text.replace("localhost", "127.0.0.1").removesuffix("/")
    references = [tidy(reference) for reference in reference_url.split(" |OR| ")]
    if url_note == "GOLD in PRED":
        return any(reference in tidy(url) for reference in references)
    return tidy(url) in references


async def evaluate_js(page, expression: str):
    """The value of `() => expression` in the page. LookupError: it throws or its promise fails."""
    try:
        return await page.evaluate(f"() => {expression}")
    except (PlaywrightError, ValueError, TypeError, KeyError):  # Playwright cannot read every value
        await page.evaluate("0")  # raises if the page is gone: no verdict
        raise LookupError from None


async def select(page, target: dict, last_url: str) -> str | None:
    """The text that a program_html target's locator names. None: there is no such element."""
    locator = target["locator"].strip()
    if not locator:
        return readable(await page.content())
    if locator.startswith("func:"):
        return readable(await call_helper(locator, page, last_url))
    with contextlib.suppress(LookupError):  # a failed one ends the rest, as in the benchmark
        for action in target.get("prep_actions") or []:  # clicks that unfold what the locator reads
            await evaluate_js(page, action)
    with contextlib.suppress(LookupError):
        value = await evaluate_js(page, locator)
        return None if value is None else readable(value)


async def wait(page, *script):
    """Runs a script that waits. If the page navigates meanwhile, waits for the next one."""
    with contextlib.suppress(PlaywrightError):
        await page.evaluate(*script)
    await page.wait_for_load_state()


async def visit(page, url: str):
    """Opens a page to judge. Raises if the site does not answer: that is not the policy's fault."""
    if "#" in url:  # if only the fragment differs, goto would keep the page, typed text included
        await page.goto("about:blank")
    response = await page.goto(url, wait_until="load")
    if response and response.status >= 500:
        raise EnvError(f"{url} answered {response.status} while the episode was judged")
    await wait(page, CALL, ["settled", [], 3000])


async def html_checks(task: dict, target: dict, page, last: str, judge) -> list[tuple]:
    """One program_html target; `last` is the address that the episode ended on."""
    async def check():
        text = await select(page, target, last)
        return await judged_checks(task, contents, text, where, judge)

    url, contents = target["url"], target["required_contents"]
    if url.startswith("func:"):
        url = await call_helper(url, page, last)
    if url != "last":
        await visit(page, url)
    where = f"{target['locator'].strip() or 'page'} of {last if url == 'last' else url}"
    # What a check finds at once is there. What it misses may come, and must_exclude has to wait for
    # it; prep_actions must run once, as a second click may undo the first.
    if not target.get("prep_actions") and "must_exclude" not in contents:
        made = await check()
        if all(passed for _, passed, _ in made):
            return made
    with contextlib.suppress(PlaywrightError):  # scripts may be on their way; 3 s as in the benchmark
        await page.wait_for_load_state("networkidle", timeout=3000)
    await wait(page, (ASSETS / "unchanged.js").read_text())
    return await check()


async def checks(task: dict, answer: str | None, page, judge=None) -> list[tuple]:
    """All checks of a task, as [(name, passed, detail)]. `page` is where the episode ended.

    Further pages open in its tab, as in WebArena: a tab of their own costs three times the CPU.
    Raises PlaywrightError, EnvError or ConnectionError if a site or the judge does not answer.
    """
    spec, out, last = task["eval"], [], page.url
    if "string_match" in spec["eval_types"]:
        text = None if answer is None else clean(str(answer))  # as in string_match
        out += await judged_checks(task, spec["reference_answers"], text, "answer", judge)
    if "url_match" in spec["eval_types"]:
        note, reference = spec.get("url_note"), spec["reference_url"]
        out.append((f"url_match {note or 'EXACT'} “{reference}”", url_match(last, reference, note),
                    f"the episode ended on {last}"))
    if "program_html" in spec["eval_types"]:
        for target in sorted(spec["program_html"], key=lambda target: target["url"] != "last"):
            out += await html_checks(task, target, page, last, judge)
    if not out:
        raise ValueError(f"task {task['task_id']} checks nothing; see --validate.")
    return out


async def score(task: dict, answer: str | None, page, why: list | None = None, judge=None) -> float:
    """The reward: 1.0 if every check passes, else 0.0. Appends the checks to `why`, if given."""
    made = await checks(task, answer, page, judge)
    if why is not None:
        why += made
    return float(all(passed for _, passed, _ in made))


# ---------------------------------------------------------------------------------------- benchmark


@dataclass
class Benchmark(Settings):
    """Knobs of a run on sites; the Configs of evaluate.py and mgrpo.py inherit them."""
    judge_url: str = ""  # OpenAI-compatible URL of a judge; "": leave out the tasks that need one
    judge_model: str = "gpt-4o-mini"  # the judge's name there
    reset_url: str = ""  # WebArena's reset server, asked for fresh sites before every batch
    screenshots: int = 0  # episodes of a split or step whose pages the report shows as pictures


class Environment:
    """The sites of a run: logs episodes in, has the sites reset, judges."""

    def __init__(self, cfg: Benchmark, sites: dict, out: str | Path):
        self.cfg, self.sites, self.out, self.judge = cfg, sites, Path(out), None
        self.logins = webarena.Logins(sites)
        if cfg.judge_url:
            self.judge = Judge(Endpoint(cfg.judge_url, cfg.judge_model), self.out / "judge.jsonl")

    async def score(self, task: dict, answer: str | None, page, why: list | None = None) -> float:
        return await score(task, answer, page, why, self.judge)

    def reset(self):
        """To call on all ranks before a batch. They share the sites: one asks, the others wait."""
        if self.cfg.reset_url:
            if rank() == 0:
                webarena.reset(self.cfg.reset_url)
            all_max(0)

    def enter(self, browser: Browser, task: dict):
        """A context manager: yields the storage state that an episode starts with, logged in."""
        return self.logins.hold(browser, task.get("storage_state"), 5 * self.cfg.timeout)

    def onlooker(self, tasks: list[dict], group: int, name: str, visible=False) -> Onlooker | None:
        """For Settings.onlooker during one batch: pictures of its first episodes, or a window."""
        jobs = [(task["task_id"], member) for task in tasks for member in range(group)]
        if visible or self.cfg.screenshots:
            return Onlooker(aim, self.out, name, set(jobs[:self.cfg.screenshots]), visible)


async def aim(session, turn) -> dict | None:
    """Where a turn's action will land, as page.js says. None: the action aims at nothing."""
    with contextlib.suppress(ActionError, EnvError, PlaywrightError):
        if element := parse(turn.response).element:
            return await session.ask("locate", int(element))


def remote_policy(endpoint: Endpoint, chat: Chat, settings: Settings, temperature: float):
    """An `Act` that sends an endpoint the messages that a checkpoint's context is written from."""
    async def act(trajectory: Trajectory, slot: int):
        text, ended = await endpoint.chat(messages(chat, trajectory), temperature=temperature,
                                          max_tokens=settings.max_new_tokens)
        return chat.encode(readable(text), ours=True) + [chat.end_id] * ended, [], ended
    return act


def evaluate(policy: Transformer | Endpoint, chat: Chat, tasks: list[dict], settings: Settings,
             environment: Environment, *, runs=1, temperature=0.0, seed=0, log=None) -> list:
    """Plays each task `runs` times, the tasks split over the ranks.

    Returns the trajectories of all ranks, ordered by task, then run.
    """
    mine = range(len(tasks))[rank()::world_size()]
    some, more = [tasks[i] for i in mine], dict(group=runs, log=log, enter=environment.enter)
    if isinstance(policy, Endpoint):
        act = remote_policy(policy, chat, settings, temperature)
        episodes = play(some, act, chat, environment.score, settings, **more)
    else:
        episodes = rollout(policy, chat, some, environment.score, settings, seed=seed,
                           temperature=temperature, **more)
    numbered = gather([(mine[k // runs], tau) for k, tau in enumerate(asyncio.run(episodes))])
    return [tau for _, tau in sorted(numbered, key=lambda pair: pair[0])]


# ------------------------------------------------------------------------------------------ figures


def wilson(successes: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95% interval of a success rate; unlike the normal one it is right near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p, zz = successes / n, z * z / n
    middle, half = p + zz / 2, z * math.sqrt(p * (1 - p) / n + zz / n / 4)
    return max(0.0, (middle - half) / (1 + zz)), min(1.0, (middle + half) / (1 + zz))


def by_task(trajectories: list[Trajectory]) -> list[list[float]]:
    """The rewards of each task's episodes, without those that the environment broke."""
    rewards = defaultdict(list)
    for t in trajectories:
        if t.status == "ok":
            rewards[t.task["task_id"], t.task["intent"]].append(t.reward)
    return list(rewards.values())


def rate(trajectories: list[Trajectory]) -> dict:
    """Success rate with its interval.

    Runs of one task are not independent. The interval uses an effective sample size: the number of
    independent episodes that would vary as the tasks' means do, from #tasks to #episodes.
    """
    rewards = by_task(trajectories)
    n, tasks = sum(map(len, rewards)), len(rewards)
    p = sum(map(sum, rewards)) / max(n, 1)
    scatter = sum((sum(r) / len(r) - p) ** 2 for r in rewards) / max(tasks - 1, 1)
    effective = min(max(p * (1 - p) * tasks / scatter, tasks), n) if scatter else tasks
    return {"success_rate": p, "ci95": list(wilson(p * effective, effective)), "n": n}


def pass_at(trajectories: list[Trajectory]) -> dict[int, float]:
    """{k: chance that one of k runs succeeds}, unbiased, over the tasks with at least k runs."""
    rewards, out = by_task(trajectories), {}
    for k in range(1, max(map(len, rewards), default=0) + 1):
        failing = [math.comb(len(r) - round(sum(r)), k) / math.comb(len(r), k)
                   for r in rewards if len(r) >= k]
        out[k] = 1 - sum(failing) / len(failing)
    return out


def summarize(trajectories: list[Trajectory]) -> dict:
    """The figures of summary.json. turns and response_tokens are means, truncated a count."""
    ok = [t for t in trajectories if t.status == "ok"]
    turns = [turn for t in ok for turn in t.turns]
    figures = rate(trajectories) | {
        "episodes": len(trajectories), "env_errors": len(trajectories) - len(ok),
        "turns": len(turns) / max(len(ok), 1),
        "response_tokens": sum(len(turn.action_ids) for turn in turns) / max(len(turns), 1),
        "exited": sum(t.answer is not None for t in ok) / max(len(ok), 1),
        "truncated": sum(not turn.ended for turn in turns),
        "invalid_actions": sum(bool(turn.error) and not turn.action for turn in turns)}
    judge_free = [t for t in trajectories if not needs_judge(t.task)]
    if len(judge_free) < len(trajectories):
        figures["judge_free"] = rate(judge_free)
    sites, templates, runs = defaultdict(list), defaultdict(list), defaultdict(list)
    for t in trajectories:
        sites[" + ".join(t.task["sites"])].append(t)
        templates[str(t.task.get("intent_template_id"))].append(t)
        runs[t.member].append(t)
    if len(runs) > 1:
        figures["runs"] = [rate(runs[member])["success_rate"] for member in sorted(runs)]
        figures["pass_at"] = pass_at(trajectories)
    figures["per_site"] = {name: rate(group) for name, group in sorted(sites.items())}
    figures["per_template"] = {
        name: {"template": str(group[0].task.get("intent_template") or "")} | rate(group)
        for name, group in templates.items()}
    return figures


def table(rows: list[tuple[str, dict]]) -> str:
    """[(name, figures of `summarize` or `rate`)] as plain text."""
    width = max(min(len(name), 48) for name, _ in rows)
    lines = [f"{'':{width}}  success    95% interval     n  turns  env errors"]
    for name, s in rows:
        interval = "{:.1%} to {:.1%}".format(*s["ci95"])
        turns = f"{s['turns']:.1f}" if "turns" in s else ""
        lines.append(f"{name:{width}.48}  {s['success_rate']:>7.1%}  {interval:>14}  {s['n']:>4}  "
                     f"{turns:>5}  {s.get('env_errors', ''):>10}".rstrip())
    return "\n".join(lines)


# -------------------------------------------------------------------------------- a run's directory


class Run:
    """A run's directory. Only rank 0 writes."""

    def __init__(self, path: str | Path, config: dict):
        self.path, self.config = Path(path), config

    def claim(self):
        """Locks the directory until this process ends: two runs in one would mix their records."""
        if rank() == 0:
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self.lock = open(self.path / "lock", "a+")
                try:
                    fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.lock.seek(0)
                    raise ValueError(f"{self.path} is in use by process {self.lock.read()}; wait "
                                     "for it, stop it, or give another --out.") from None
                self.lock.truncate(0)
                print(os.getpid(), end="", file=self.lock, flush=True)

    def replace(self, name: str, content: str | dict):
        """Writes a file under another name and renames it: readers never see half of it."""
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        if rank() == 0:
            with writing(self.path / name):
                temporary = self.path / f"{name}.{os.getpid()}.tmp"  # --report may write beside a run
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self.path / name)

    def append(self, name: str, rows: list[dict]):
        if rank() == 0:
            with writing(self.path / name), open(self.path / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def write(self, row: dict):
        """A row of metrics. JSON has no NaN, so non-finite numbers become null."""
        self.append("metrics.jsonl", [json.loads(json.dumps(row), parse_constant=lambda _: None)])


def describe_run(cfg, device) -> dict:
    """The resolved configuration and what else is needed to repeat the run."""
    describe = "git describe --always --exclude=* --abbrev=12 --dirty=+changes".split()
    commit, hardware = "", f"cpu, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):  # git is not installed
        done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
        commit = done.stdout.strip()
    return {"script": Path(sys.argv[0]).name, **asdict(cfg), "commit": commit,
            "torch": torch.__version__, "device": hardware}


def start_run(cfg, device, model_config: dict | None = None, first: int = 0) -> Run:
    """Begins a run in cfg.out, or continues the one there at step `first`."""
    for name in ("model", "data"):
        given, out = Path(getattr(cfg, name, "") or "/").resolve(), Path(cfg.out).resolve()
        if first == 0 and given.exists() and out in (given, given.parent):
            raise ValueError(f"--{name} {given} is in --out, which a new run overwrites; "
                             "choose another --out.")
    run = Run(cfg.out, describe_run(cfg, device))
    run.claim()
    if rank() == 0:
        if first == 0:  # the next start must not continue the run that was here before
            forget(run.path / "state")
        for path in (run.path / "metrics.jsonl", run.path / "trajectories.jsonl"):
            with writing(path):
                if first == 0:
                    path.unlink(missing_ok=True)
                keep_rows(path, lambda row: (row.get("step") or 0) < first)  # later ones come again
        run.replace("config.json", (model_config or {}) | {"run": run.config})
        print("config: " + ", ".join(f"{key} {value}" for key, value in run.config.items()))
    return run


def resume(cfg, model, optimizer, free: set[str]) -> int:
    """Loads the training state in cfg.out, if there is one; returns the step to continue with.

    Randomness depends on (seed, step, task, member) alone, so there is no generator to restore. The
    run must have the same values, but for `free` and those that say where and how fast it runs.
    """
    state = Path(cfg.out) / "state"
    extra = load_training(state, model, optimizer) if cfg.resume else None
    if extra is None:
        return 0
    free = free | {"out", "resume", "force", "save_every", "concurrency", "timeout", "max_tokens",
                   "recompute", "replicas", "screenshots"}
    with reading(state):
        was, step = extra["config"], int(extra["step"])
        other = [f"{key} {was[key]!r:.60}, not {now!r:.60}" for key, now in asdict(cfg).items()
                 if key not in free and was.get(key, now) != now]
    if other and not cfg.force:
        raise ValueError(f"{cfg.out} holds a run with {'; '.join(other)}. Give the same values, "
                         "--force to continue anyway, --no-resume to start over, or another --out.")
    return step


def forget(state: Path):
    """Deletes a training state: at once, so that a killed process leaves all of it or nothing."""
    shutil.rmtree(gone := state.with_name("state.old"), ignore_errors=True)
    if state.exists():
        state.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def keep_rows(path: Path, keep):
    """Rewrites a .jsonl file without the rows that `keep` refuses and a cut-off last line."""
    if path.exists():
        shorter = path.with_suffix(".tmp")
        with reading(path), open(path, "rb") as old, open(shorter, "wb") as new:
            new.writelines(line for line in old if line.endswith(b"\n") and keep(json.loads(line)))
        shorter.replace(path)


def newest(path: Path, count: int = 2000, size: int = 40_000_000) -> tuple[list[dict], int]:
    """The rows in the last `size` bytes of a .jsonl file, at most `count`; how many it left out."""
    if not path.exists():
        return [], 0
    with open(path, "rb") as file:
        total = sum(1 for _ in file)
        file.seek(max(0, file.tell() - size))
        lines, rows = file.read().splitlines()[-count:], []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # the first or last may be cut off
            rows.append(json.loads(line, parse_constant=lambda _: None))  # JSON knows no NaN
    return rows, total - len(rows)


def report(run_dir: str | Path, others=()) -> Path:
    """Writes run_dir/report.html, one file that needs no network -> its path. others: to compare."""
    path = Path(run_dir)
    if not path.is_dir():
        raise ValueError(f"there is no run at {path}; give --out the directory of a run.")
    trajectories, left_out = newest(path / "trajectories.jsonl")
    metrics, _ = newest(path / "metrics.jsonl", count=100_000)
    config = read_json(path / "config.json") if (path / "config.json").exists() else {}
    summaries = [read_json(file) | {"name": file.parent.resolve().name}
                 for run in (*others, path) for file in sorted(Path(run).glob("summary*.json"))]
    embed(trajectories, path)
    data = {"name": path.name, "config": config.get("run", {}), "metrics": metrics,
            "trajectories": trajectories, "left_out": left_out, "summaries": summaries}
    template = (ASSETS / "report.html").read_text(encoding="utf-8")
    # Page text is hostile: without a "<" it cannot close the script element that holds the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    Run(path, {}).replace("report.html", template.replace("/*DATA*/", text))
    return path / "report.html"


def compare(runs: list[str]) -> str:
    """The evaluations of several runs in one table, split by split."""
    rows = []
    for path in (Path(run) / "summary.json" for run in runs):
        with reading(path):
            splits = read_json(path)["splits"]
            rows += [(f"{split}  {path.parent.name}", figures) for split, figures in splits.items()]
            table(rows)  # raises here, while we know the file, if figures are missing
    shown = table(sorted(rows, key=lambda row: row[0].split()[0]))
    return f"{shown}\n{with_size(report(runs[-1], runs[:-1]))}"


def with_size(report: Path) -> str:
    return f"report: {report} ({report.stat().st_size / 1e6:.1f} MB)"


# --------------------------------------------------------------------------------- the command line


def remembered(checkpoint: str) -> dict:
    """The sizes and the kind of pages that a checkpoint of ours was trained with."""
    path = Path(checkpoint) / "config.json"
    run = read_json(path).get("run") if checkpoint and path.exists() else None
    sizes = "max_turns max_new_tokens max_context viewport_only text_only max_page_chars".split()
    return {name: run[name] for name in sizes if name in (run or {})}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def parse_args(Config, description: str, presets: dict[str, dict], start: str):
    """A Config from the command line, else presets, else the checkpoint's memory, else defaults."""
    parser = argparse.ArgumentParser(description=description, usage="%(prog)s [--FLAG VALUE ...]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    source = "".join(inspect.getsource(kind) for kind in reversed(Config.__mro__[:-1]))
    comments = dict(re.findall(r"^    (\w+): .*?#\s*(.+)$", source, re.MULTILINE))
    kinds = {bool: {"action": argparse.BooleanOptionalAction},
             list[int]: {"type": numbers, "metavar": "N,N,..."}}
    for f in fields(Config):
        kind = kinds.get(f.type, {"type": f.type, "metavar": f.type.__name__.upper()})
        text = comments.get(f.name, "").replace("%", "%%")
        parser.add_argument("--" + f.name.replace("_", "-"), default=getattr(Config(), f.name),
                            help=f"{text} (default: %(default)r)", **kind)
    known = parser.parse_known_args()[0]
    if issubclass(Config, Benchmark):  # not bc.py, which only starts from its checkpoint
        other = ("policy_url", "validate", "report", "compare")  # uses no checkpoint
        start = "" if any(getattr(known, name, "") for name in other) else start
        for name, value in remembered(known.model or start).items():
            # argparse parses a default that is text, so 10 becomes [10] where a list is due.
            parser.set_defaults(**{name: value if isinstance(value, bool) else str(value)})
    for name, values in presets.items():
        parser.set_defaults(**values if getattr(known, name) else {})
    given = vars(parser.parse_args())
    counts = "max_turns max_new_tokens concurrency batch G updates_per_batch runs".split()
    for name, count in ((name, given[name]) for name in counts if name in given):
        if min(count if isinstance(count, list) else [count]) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {count}: give at least 1.")
    return Config(**given)


def end_on_signals(script: str):
    """Ctrl-C and SIGTERM end the process at once with one line.

    Python runs its own handlers between bytecodes, so not in a rank that waits in a collective. The
    wakeup file descriptor is written at once, and a thread waits for it.
    """
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending)

    def watch():
        number = os.read(receiving, 1)[0]
        with contextlib.suppress(OSError):  # stderr may be closed, or a pipe whose reader has gone
            os.write(2, f"{script}: ended by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=watch, daemon=True).start()


def leave(status: int | str | None = None):
    """sys.exit for a script that may be one of several ranks; those end at once.

    Torch keeps the group's threads until Python is torn down under them, which now and then aborts
    a rank whose work is done; destroy_process_group() does not stop them.
    """
    if not torch.distributed.is_initialized():
        sys.exit(status)
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))


def command_line(main, Config, description: str, presets: dict[str, dict] = {}, start: str = ""):
    """Runs a script's main(Config). The user's errors, signals and lost ranks print one line.

    presets: {flag: the values it stands for}. start: the checkpoint opened without --model.
    """
    script = Path(sys.argv[0]).name
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stdout.reconfigure(line_buffering=True)  # a signal leaves no time to flush
    end_on_signals(script)
    try:
        status = main(parse_args(Config, description, presets, start))
    except (ValueError, OSError) as error:
        status = f"{script}: {error}"
    except PlaywrightError as error:  # what happens in a page never comes this far
        said = re.search(r"\[err\] (.+)", str(error))  # by Chromium itself
        status = f"{script}: Chromium failed: {first_line(said[1] if said else error)}"
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, torch.distributed.DistError):
            raise
        status = f"{script}: rank {rank()} lost another rank; run the same command again."
    leave(status)


# --------------------------------------------------------------------------------------- the script


@dataclass
class Config(Benchmark):
    # What to do
    model: str = ""  # checkpoint directory or hub id; "": runs/mgrpo
    policy_url: str = ""  # instead: a model behind an OpenAI-compatible URL (key: OPENAI_API_KEY)
    policy_model: str = ""  # its name there
    tasks: str = "sandbox:test"  # sandbox:SPLIT[/TEMPLATE][:N], miniwob[:NAME,...][:SEEDS], files
    out: str = "runs/eval"  # for summary.json, trajectories.jsonl, report.html
    validate: str = ""  # only say what this task file holds and what is broken in it
    report: bool = False  # only write the report of --out again
    compare: str = ""  # only print the evaluations of these runs, with commas between, in one table
    watch: bool = False  # play in a window, at a person's pace, and print what the policy thinks
    # How to play. A checkpoint of ours remembers its sizes.
    max_turns: list[int] = field(default_factory=lambda: [15])  # per episode; 5,10,15: each in turn
    temperature: float = 0.0  # 0: greedy
    runs: int = 1  # episodes per task; more than one needs a temperature above 0
    seed: int = 0  # of sampling, at a temperature above 0


def open_policy(cfg: Config, device) -> tuple[Transformer | Endpoint, Chat]:
    model = cfg.model or ("" if cfg.policy_url else "runs/mgrpo")
    if model:
        chat = open_chat(load_tokenizer(model), model, actions_help())
    else:  # the small base's tokenizer only counts: about twice as many tokens as a real one
        tokenizer = load_tokenizer(Path(__file__).parent / "worlds" / "base")
        chat = Chat(tokenizer, system_prompt(actions_help(), think=True))
    if cfg.policy_url:
        return Endpoint(cfg.policy_url, cfg.policy_model), chat
    return load(model, computing_dtype(device), device), chat


def measure(policy, chat: Chat, cfg: Config, environment: Environment, run: Run, log):
    """Plays every split under every turn limit -> ({name: figures}, episodes of the last limit)."""
    splits, shared = {}, {f.name: getattr(cfg, f.name) for f in fields(Settings)}
    judge = environment.judge is not None
    for limit in cfg.max_turns:
        everything, settings = [], Settings(**shared | {"max_turns": limit})
        for part in sources(cfg.tasks):
            split = part if len(cfg.max_turns) == 1 else f"{part} within {limit} turns"
            tasks = load_tasks(part, environment.sites, judge=judge, log=log)
            environment.reset()
            settings.onlooker = environment.onlooker(tasks, cfg.runs, split, cfg.watch)
            played = evaluate(policy, chat, tasks, settings, environment, runs=cfg.runs,
                              temperature=cfg.temperature, seed=cfg.seed,
                              log=ticker(f"{split:.48}: ") if rank() == 0 else None)
            if all(t.status != "ok" for t in played):
                raise ValueError(f"the environment broke all {len(played)} episodes, the first "
                                 f"with {played[0].checks}; check the sites in a browser.")
            if rank() == 0:
                keep_rows(run.path / "trajectories.jsonl", lambda row: row.get("split") != split)
            run.append("trajectories.jsonl", [t.to_json(chat, step=None, split=split) for t in played])
            splits[split] = summarize(played)
            everything += played
    return splits, everything


def print_splits(splits: dict[str, dict]):
    rows = []
    for split, figures in splits.items():
        rows += [(split, figures)] + [(f"  {site}", r) for site, r in figures["per_site"].items()]
        rows += [("  without a judge", figures["judge_free"])] if "judge_free" in figures else []
    print(table(rows))
    for split, figures in splits.items():
        if "pass_at" in figures:
            each = [f"{success:.1%}" for success in figures["runs"]]
            chances = [f"pass@{k} {chance:.1%}" for k, chance in figures["pass_at"].items()]
            print(f"{split}: runs {', '.join(each)}; {', '.join(chances)}")


def main(cfg: Config) -> int | None:
    if cfg.validate:
        return webarena.validate(cfg.validate)
    if cfg.report or cfg.compare:
        return print(with_size(report(cfg.out)) if cfg.report else compare(cfg.compare.split(",")))
    cfg = replace(cfg, concurrency=1) if cfg.watch else cfg
    device = init_dist()
    log = print if rank() == 0 else (lambda *_: None)
    policy, chat = open_policy(cfg, device)
    run = Run(cfg.out, describe_run(cfg, device))
    run.claim()
    with open_sites(cfg.tasks) as sites:
        splits, everything = measure(policy, chat, cfg, Environment(cfg, sites, run.path), run, log)
    if rank() == 0:
        config = run.path / "config.json"
        if not config.exists() or "model_type" not in read_json(config):  # not a checkpoint's own
            run.replace("config.json", {"run": run.config})
        run.replace("summary.json", summarize(everything) | {"run": run.config, "splits": splits})
        print_splits(splits)
        print(with_size(report(run.path)))


if __name__ == "__main__":
    command_line(main, Config, __doc__, start="runs/mgrpo")
