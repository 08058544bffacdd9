"""Everything that judges: `score`, sites and logins of an episode, the benchmark, its statistics.

A task says what must be true at the end. Every check is 0 or 1, and their product is the reward:

    "eval_types": ["string_match", "url_match", "program_html"]      which kinds count ("verify": a program)
    "reference_answers": {"must_include": ["17"]}                     about exit's message
    "reference_url": "http://.../Monday"                              about the address it ended on
    "program_html": [{"url": "last",                                  open this whole address ("last": stay)
        "locator": "document.querySelector('h1').outerText",          read what this JavaScript finds ("": all)
        "required_contents": {"exact_match": "Done"}}]                about that text

    score -> checks -> judged_checks of the answer -> MATCHERS
                    -> html_checks of pages -> judged_checks of what a locator finds -> MATCHERS
                    -> url_match of the address
                    -> verify, a program that judges

    python evaluate.py --model runs/mgrpo --tasks sandbox:test,sandbox:test-unseen
    torchrun --nproc_per_node 8 evaluate.py --model runs/mgrpo --tasks test.json  # SHOPPING=http://...
    python evaluate.py --policy-url https://api.openai.com/v1 --policy-model o4-mini --temperature 1
    python evaluate.py --validate test.json        # what a task file holds, what is broken in it
    python evaluate.py --model runs/mgrpo --tasks infinity:CLONE/gmail:easy  # WebArena-Infinity
    python evaluate.py --model runs/mgrpo --tasks sandbox:test:1 --watch   # in a window
    python evaluate.py --report --out runs/mgrpo   # only write a run's report.html again

If an evaluation is interrupted, or sites fail, repeat its command: only the episodes that are missing are played.

`score` is both the training reward and the benchmark's metric. It follows VisualAgentBench's
evaluators, which produced the paper's numbers. WebArena's own are laxer: they ignore the order of a query's
parameters, accept parts of words, and take "GOLD in PRED" where a task has no url_note. We differ from
VisualAgentBench's on purpose:

    - An episode that never exits has no answer. Every check of its answer fails, even where
      the reference is "N/A".
    - A missing element fails its check. A site that does not answer, and a locator that is not
      valid JavaScript, raise, and the episode ends as "env_error".
    - The page that the episode left open is judged first; other pages are then opened in its tab.
    - A page is read as soon as it has loaded (within --timeout) and settled. If a check fails, we wait until the
      page's requests are answered, then until it has not changed for a second, each for 3 s at most, and read
      it again. With must_exclude or prep_actions it is read only this second time. The benchmark waits 3 s.
    - All kinds of checks in a page's required_contents count. The benchmark tests only one.
    - Where the benchmark crashes (on must_include after required_values, on a url_note of null) or forgets a failed
      check (next to a fuzzy_match of "N/A"), the checks are judged as written. Locators that begin with lambda: are
      refused.
    - A helper function in a task file is looked up in a table. No text of a file runs as Python.
    - An episode ends by exit, at the turn limit or with a full context. The benchmark also stops after
      five responses in a row without an action, or five equal actions.
    - The judge's verdict (fuzzy_match) is the last line of its reply. Without --judge-url the tasks
      that need a judge are left out and counted.
"""
import run  # first: it prepares OpenMP before torch loads

import asyncio
import hashlib
import json
import math
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import compress
import model
import worlds
from compress import Chat, Trajectory, Turn, to_record
from rollout import Settings, actions_help, parse, play, rollout, task_key
from worlds import browser, onlooker, serve, webarena
from worlds.endpoint import Endpoint, Judge
from worlds.verifier import verify
from worlds.webarena import alternatives
from worlds.words import words

# --------------------------------------------------------------------- evaluators: texts and URLs --


class Check(NamedTuple):
    """One thing that a task asks for, and whether the episode has it."""
    name: str    # such as: must_include “red lamp”
    passed: bool
    detail: str  # what was found


def clean(text: str) -> str:
    """Lower case, without one pair of quotes around it. Keeps spaces, as VisualAgentBench does."""
    for quote in "'\"":
        if text.startswith(quote) and text.endswith(quote):
            return text[1:-1].lower()
    return text.lower()


def includes(ref: str, text: str, in_slashes=True) -> bool:
    """Whether text contains ref: a single word as a word (170 is not in 000000170), more words anywhere.

    in_slashes: the word may also stand between slashes: 170 is in 170/171.
    """
    ref = clean(ref)
    text = clean(text)
    if len(words(ref)) != 1:
        return ref in text
    found = words(text)
    if ref in found:
        return True
    return in_slashes and any(ref in word.split("/") for word in found)


def satisfies(inequality: str, text: str) -> bool:
    """Whether an integer, thousands separators allowed, satisfies something like "<= 700"."""
    sign, bound = webarena.INEQUALITY.fullmatch(inequality).groups()
    try:
        number = int(text.replace(",", ""))
    except ValueError:
        return False
    bound = float(bound)
    # The benchmark tolerates 1e-8, so < and > accept equal numbers as well.
    if sign in ("<", "<="):
        return number <= bound
    if sign in (">", ">="):
        return number >= bound
    return number == bound


def exact_match(ref: str, text: str) -> bool:
    return clean(text) == clean(ref)


def must_include(ref: str, text: str) -> bool:
    return any(includes(one, text) for one in alternatives(ref))


def must_exclude(ref: str, text: str) -> bool:
    return not includes(ref, text, in_slashes=False)


def one_of(ref: str, text: str) -> bool:
    return clean(ref) in text.lower()  # not cleaned here: an answer is already, and a page's text keeps its quotes


def required_values(ref: str, text: str) -> bool:
    return any(satisfies(one, text) for one in alternatives(ref))


MATCHERS = {  # check -> matcher(reference, text). All references must pass; for one_of, any of them
    "exact_match": exact_match,
    "must_include": must_include,
    "must_exclude": must_exclude,
    "one_of": one_of,
    "required_values": required_values,
}


def contents_checks(contents: dict, text: str | None, subject: str) -> list[Check]:
    """Every check of `contents` on a text. If there is no text, all fail.

    contents: {check: references}. subject: what the text is, for people.
    """
    detail = f"there is no {subject}"
    if text is not None:
        shown = repr(text[:200])[1:-1]  # tabs and the like are seen: they count
        detail = f"the {subject} is “{shown}”"
    results = []
    for kind, references in contents.items():
        if kind not in MATCHERS:
            raise ValueError(f"{kind} needs a language model as judge; give --judge-url.")
        if not isinstance(references, list):
            references = [references]
        references = [str(ref) for ref in references]
        passes = [False] * len(references)
        if text is not None:
            matches = MATCHERS[kind]
            passes = [matches(ref, text) for ref in references]
        if kind == "one_of":
            references = [" |OR| ".join(references)]
            passes = [any(passes)]
        for ref, passed in zip(references, passes):
            results.append(Check(f"{kind} “{ref}”", passed, detail))
    return results


async def judged_checks(task: dict, contents: dict, text: str | None, *, subject: str,
                        judge: Judge | None) -> list[Check]:
    """`contents_checks`, and fuzzy_match by the judge if there is one."""
    if judge is None or "fuzzy_match" not in contents:
        return contents_checks(contents, text, subject)
    references = contents["fuzzy_match"]
    passed = False
    detail = f"there is no {subject}"
    if text is not None:
        passed, detail = await judge(task, references, text)
    others = {kind: value for kind, value in contents.items() if kind != "fuzzy_match"}
    results = contents_checks(others, text, subject)
    return [*results, Check(f"fuzzy_match “{references}”", passed, detail)]


def answer_text(answer: str | None) -> str | None:
    """The answer as matchers get it: cleaned. As in the benchmark, most of them clean it again."""
    return None if answer is None else clean(answer)


def string_match(answer: str | None, reference_answers: dict) -> bool:
    """Whether an answer passes every check of it. None, an episode that never exited, passes none."""
    results = contents_checks(reference_answers, answer_text(answer), "answer")
    return all(check.passed for check in results)


def tidy(url: str) -> str:
    return url.replace("localhost", "127.0.0.1").removesuffix("/")


def url_match(url: str, reference_url: str, url_note: str | None = None) -> bool:
    """EXACT, the default: equal up to localhost and a trailing slash. GOLD in PRED: contains it."""
    references = [tidy(reference) for reference in alternatives(reference_url)]
    if url_note in (None, "EXACT"):
        return tidy(url) in references
    if url_note == "GOLD in PRED":
        return any(reference in tidy(url) for reference in references)
    raise ValueError(f'url_note {url_note!r} is unknown; use "EXACT" or "GOLD in PRED".')


# ------------------------------------------------------------------------------ evaluators: pages --


async def evaluate_js(page, expression: str):
    """The value of `() => expression` in the page. LookupError: it throws or its promise fails.

    Raises EnvError if it is not valid JavaScript: that is the task's fault, not the policy's.
    """
    # Playwright itself raises the last three, over values that it cannot read.
    failures = (browser.PlaywrightError, ValueError, TypeError, KeyError)
    try:
        return await page.evaluate(f"() => {expression}")
    except failures as error:
        reason = browser.first_line(error).removeprefix("Page.evaluate: ")
    try:
        await page.evaluate(f"() => () => {expression}")  # reads it, but runs nothing
    except browser.PlaywrightError as error:
        if "SyntaxError" not in str(error):
            raise  # the page is gone: no verdict
        raise browser.EnvError(f"the task's {expression!r:.80} is not valid JavaScript ({reason})") from None
    raise LookupError(reason)


NODE = "ref: <Node>"  # what Playwright gives for an element; a page's text may say so, too
# Whether the value of an expression is an element, or holds one.
FINDS_NODE = """Promise.resolve(%s).then(function holds(found) {
    return found instanceof Node || Object(found) === found && Object.values(found).some(holds);
})"""


async def located_text(page, target: dict, last_url: str) -> str | None:
    """The text that a program_html target's locator finds. None, or LookupError: it finds no element."""
    locator = target["locator"].strip()
    if not locator:
        return browser.readable(await page.content())
    if locator.startswith("func:"):
        return browser.readable(await webarena.call_helper(locator, page, last_url))

    # Clicks that unfold what the locator reads. The first one that fails ends the loop, as in the benchmark.
    with suppress(LookupError):
        for action in target.get("prep_actions") or []:
            await evaluate_js(page, action)
    value = await evaluate_js(page, locator)
    if NODE in str(value) and await evaluate_js(page, FINDS_NODE % locator):
        raise browser.EnvError(f"the task's locator {locator!r:.80} finds an element, not its text; add .innerText")
    return None if value is None else browser.readable(value)


async def visit(page, url: str):
    """Opens a page to judge. Raises if the site does not answer: that is not the policy's fault."""
    if "#" in url:  # if only the fragment differs, goto would keep the page, typed text included
        await page.goto("about:blank")
    response = await page.goto(url, wait_until="domcontentloaded")
    if response is not None and response.status >= 500:
        raise browser.EnvError(f"{url} answered {response.status} while the episode was judged")
    with suppress(browser.PlaywrightError):  # an image that never comes changes no verdict
        await page.wait_for_load_state()
    with suppress(browser.PlaywrightError):  # its scripts may navigate meanwhile
        await page.evaluate(browser.CALL, ["settled", [], 3000])
    with suppress(browser.PlaywrightError):  # then the page that they went to is judged
        await page.wait_for_load_state("domcontentloaded")


async def html_checks(task: dict, target: dict, page, *, last_url: str, judge=None) -> list[Check]:
    """The checks of one program_html target. last_url: the address that the episode ended on."""
    # 1) Open the page.
    url = target["url"]
    if url.startswith("func:"):
        url = await webarena.call_helper(url, page, last_url)
    shown = last_url
    if url != "last":
        await visit(page, url)
        shown = url

    contents = target["required_contents"]
    subject = f"{target['locator'].strip() or 'page'} of {shown}"

    async def look() -> list[Check]:
        text = None
        reason = ""
        try:
            text = await located_text(page, target, last_url)
        except LookupError as error:
            reason = f" ({error})"
        return await judged_checks(task, contents, text, subject=subject + reason, judge=judge)

    # 2) Look at once, with two exceptions. Text that is missing may still come, so must_exclude has to wait. And
    #    prep_actions must run only once, since a second click may undo the first.
    has_to_wait = target.get("prep_actions") or "must_exclude" in contents
    if not has_to_wait:
        results = await look()
        if all(check.passed for check in results):
            return results

    # 3) Look, perhaps again, once nothing changes any more. Scripts may still be on their way: the benchmark
    #    gives them three seconds.
    with suppress(browser.PlaywrightError):
        await page.wait_for_load_state("networkidle", timeout=3000)
    await browser.await_unchanged(page)
    return await look()


async def checks(task: dict, answer: str | None, page, judge=None) -> list[Check]:
    """All checks of a task. `page` is where the episode ended.

    Further pages open in its tab, as in WebArena: a tab of their own costs three times the CPU.
    Raises PlaywrightError, EnvError or ConnectionError if a site or the judge does not answer.
    """
    spec = task["eval"]
    last_url = page.url
    results = []
    if "string_match" in spec["eval_types"]:
        results += await judged_checks(task, spec["reference_answers"], answer_text(answer),
                                       subject="answer", judge=judge)
    if "url_match" in spec["eval_types"]:
        reference = spec["reference_url"]
        note = spec.get("url_note")
        results.append(Check(name=f"url_match {note or 'EXACT'} “{reference}”",
                             passed=url_match(last_url, reference, note),
                             detail=f"the episode ended on {last_url}"))
    if "verify" in spec["eval_types"]:
        first, *_ = browser.start_pages(task)
        passed, reason = await verify(spec["verify"], browser.origin(first))
        results.append(Check(f"verify {Path(spec['verify']).name}", passed, reason))
    if "program_html" in spec["eval_types"]:
        # The page that the episode left open comes first, before its tab goes elsewhere.
        here = [target for target in spec["program_html"] if target["url"] == "last"]
        elsewhere = [target for target in spec["program_html"] if target["url"] != "last"]
        for target in here + elsewhere:
            results += await html_checks(task, target, page, last_url=last_url, judge=judge)
    if not results:
        raise ValueError(f"task {task['task_id']} checks nothing; see --validate.")
    return results


async def score(task: dict, answer: str | None, page, why=None, judge=None) -> float:
    """1.0 if every check passes, else 0.0. why: a list that the checks are appended to."""
    results = await checks(task, answer, page, judge)
    if why is not None:
        why += results
    return float(all(check.passed for check in results))


# ------------------------------------------------ what an episode needs besides browser and policy --


@dataclass
class SiteSettings(Settings):
    """Knobs of the sites that a run acts on; the Configs of evaluate.py and mgrpo.py inherit them."""
    judge_url: str | None = None  # OpenAI-compatible URL; None: leave out tasks that need a judge
    judge_model: str = "gpt-4o-mini"  # the judge's name there
    reset_url: str | None = None  # WebArena's reset server, asked for fresh sites before every batch
    screenshots: int = 0  # episodes of a split or step that the report shows with pictures


class Environment:
    """What an episode needs besides the browser and the policy: resets sites, logs in, takes pictures, judges."""

    def __init__(self, sites: dict, out: str | Path, cfg: SiteSettings | None = None,
                 visible=False):
        """sites: {SITE: address}. out: the run's directory. visible: play in a window."""
        cfg = cfg or SiteSettings()
        if visible:
            remedy = "leave it out; evaluate.py --screenshots 8 puts pictures into the report"
            onlooker.require_display("--watch", remedy)
        self.sites = sites
        self.out = Path(out)
        self.cfg = cfg
        self.visible = visible
        self.logins = webarena.Logins(sites)
        self.servers = serve.Servers(self.out)
        self.judge = None
        if cfg.judge_url:
            endpoint = Endpoint(cfg.judge_url, cfg.judge_model)
            self.judge = Judge(endpoint, self.out / "judge.jsonl")
        self.pictured = {}  # this batch's episodes that get pictures: (task key, member) -> name
        self.batch_name = ""
        self.unfinished = None  # in an evaluation: the `Unfinished` that keeps its episodes
        self.reported = set()  # the origins that `report_blocked` has named

    def begin_batch(self, tasks: list[dict], group_size: int = 1, name: str = ""):
        """Call this on all ranks before a batch, which plays each of the tasks `group_size` times.

        name: of the batch. Its pictures are named after it ("": take none), and an interrupted evaluation
        finds its episodes by it.
        """
        if name != self.batch_name:  # a fork may play a step's batch in several parts
            self.pictured = {}
        self.batch_name = name
        for task in tasks:
            key = task_key(task)
            for member in range(group_size):
                if name and len(self.pictured) < self.cfg.screenshots:
                    self.pictured[key, member] = f"{name}-{key}-{member}"
        if self.cfg.reset_url:
            # The ranks share the sites: one asks, the others wait.
            if run.rank() == 0:
                webarena.reset(self.cfg.reset_url)
            run.barrier()

    @asynccontextmanager
    async def enter(self, chromium: browser.Browser, task: dict):
        """Starts the task's server and logs in; yields the task as it is played."""
        timeout = self.cfg.timeout
        async with AsyncExitStack() as stack:
            if "serve" in task:
                task = await stack.enter_async_context(self.servers.serve(task, timeout))
            holding = self.logins.hold(chromium, task.get("storage_state"), 5 * timeout)
            state = await stack.enter_async_context(holding)
            yield {**task, "storage_state": state}

    def earlier(self, task: dict, member: int) -> Trajectory | None:
        """The episode, if it was judged before the evaluation was interrupted."""
        if self.unfinished is None:
            return None
        return self.unfinished.find(self.batch_name, task, member)

    def keep(self, trajectory: Trajectory):
        """In an evaluation: saves a finished episode, so that a resumed one need not play it again."""
        if self.unfinished is not None:
            self.unfinished.add(self.batch_name, trajectory)

    def prepare(self, task: dict):
        """Starts the server of a task that is played next."""
        if "serve" in task:
            self.servers.prepare(task, self.cfg.timeout)

    async def end_prepared(self):
        """Ends the servers that were started for episodes which are not played after all."""
        await self.servers.end_prepared()

    def report_blocked(self, origins: set[str]):
        """Prints, once each, the origins to which pages sent requests that the browser blocked (rank 0's episodes)."""
        news = sorted(origins - self.reported)
        self.reported.update(news)
        if news:
            run.print0("pages sent requests to sites that no task names, and the browser blocked them; if your site "
                       f"needs these, add --allow {','.join(news[:10])}")

    async def watch(self, session, trajectory: Trajectory):
        """Called before each action: keeps a picture of the page, or shows it in the window."""
        name = self.pictured.get((task_key(trajectory.task), trajectory.member))
        if not self.visible and name is None:
            return
        turn = trajectory.turns[-1]
        frame = onlooker.frame_of(await spot_of_action(session, turn))
        if self.visible:
            onlooker.tell(trajectory)
            await onlooker.highlight(session, frame)
        else:
            name = f"{name}-{len(trajectory.turns)}"
            await onlooker.photograph(session, turn, frame, directory=self.out, name=name)

    async def verdict(self, task: dict, answer: str | None, page, why: list) -> float:
        """1.0 if every check of the episode passes, else 0.0. Appends the checks to `why`."""
        if "serve" in task:
            await serve.require_answer(task, self.cfg.timeout)
        return await score(task, answer, page, why, judge=self.judge)


async def spot_of_action(session, turn) -> dict | None:
    """Where a turn's action will land, as worlds/page/ says. None: the action is for no element."""
    with suppress(browser.ActionError, browser.EnvError, browser.PlaywrightError):
        element = parse(turn.response).element
        if element is not None:
            return await session.ask("locate", int(element))
    return None


# ---------------------------------------------------------------------------------- the benchmark --


def remote_policy(endpoint: Endpoint, chat: Chat, settings: Settings, temperature: float):
    """An `act` for a model behind a URL: it gets the context as chat messages, not as ids."""
    async def act(trajectory: Trajectory, slot: int):
        text, ended = await endpoint.chat(compress.messages(chat, trajectory), temperature=temperature,
                                          max_tokens=settings.max_new_tokens)
        ids = chat.encode(browser.readable(text), tags=True)
        if ended:
            ids.append(chat.end_id)
        return ids, [], ended  # without log-probs: nothing is trained on it
    return act


def evaluate(policy, chat: Chat, tasks: list[dict], env: Environment, settings: Settings, *,
             runs=1, temperature=0.0, seed=0, tick=run.ignore) -> list[Trajectory]:
    """Plays each task `runs` times, the tasks split over the ranks.

    policy: a Transformer or an Endpoint. Returns the trajectories of all ranks, ordered by task,
    then run.
    """
    mine = tasks[run.rank()::run.world_size()]
    if isinstance(policy, Endpoint):
        act = remote_policy(policy, chat, settings, temperature)
        playing = play(act, chat, mine, env=env, settings=settings, group_size=runs, tick=tick)
    else:
        playing = rollout(policy, chat, mine, env=env, settings=settings, group_size=runs,
                          seed=seed, temperature=temperature, tick=tick)
    played = run.gather(asyncio.run(playing))
    return in_task_order(played, tasks)


def in_task_order(played: list[Trajectory], tasks: list[dict]) -> list[Trajectory]:
    """The ranks' episodes in the order of `tasks`. The sort is stable: episodes of one task keep theirs."""
    place = {}
    for number, task in enumerate(tasks):
        place[task_key(task)] = number
    return sorted(played, key=lambda tau: place[task_key(tau.task)])


def require_verdicts(played: list[Trajectory], out: Path):
    """Raises if the environment broke every episode: sites that are down give no result, not even 0%."""
    if not any(tau.status == "ok" for tau in played):
        raise ValueError(why_no_verdicts(played, out))


def why_no_verdicts(played: list[Trajectory], out: Path) -> str:
    """What broke the first of these episodes, and what to do about it.

    out: the run's directory, which holds what failed servers wrote.
    """
    reason = played[0].broken_by
    remedy = "open the site in a browser"
    if "is not valid JavaScript" in reason or "add .innerText" in reason:
        remedy = "correct the task's locator"
    elif reason.startswith("the verifier"):
        remedy = "correct the verifier"
    elif "RemoteDisconnected" in reason:
        remedy = "see what the endpoint printed"
    elif "/chat/completions" in reason:
        remedy = "check the endpoint's address, its model's name and OPENAI_API_KEY"
    elif (out / "servers.log").exists():
        remedy = f"see what the site's server wrote in {out / 'servers.log'}"
    return (f"none of the {len(played)} episodes could be played and judged, the first because "
            f"of this: {reason}; {remedy}.")


# ------------------------------------------------------------------------------------- statistics --


def mean(values: list) -> float | None:
    return sum(values) / len(values) if values else None


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Wilson's 95% interval of a success rate; unlike the normal one it is right near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959964  # 95% of a normal distribution lie within z standard deviations
    p = successes / n
    zz = z * z / n
    middle = p + zz / 2
    half = z * math.sqrt(p * (1 - p) / n + zz / n / 4)
    low = (middle - half) / (1 + zz)
    high = (middle + half) / (1 + zz)
    return max(0.0, low), min(1.0, high)


def by_task(trajectories: list[Trajectory]) -> list[list[float]]:
    """Each task's successes, 0 or 1 an episode. Without broken episodes, and without tasks that have no others."""
    successes = defaultdict(list)
    for tau in trajectories:
        if tau.status != "ok":
            continue
        key = task_key(tau.task)
        if "intent_from" in tau.task:  # MiniWoB++: the page makes up its task; each sentence counts for itself
            key = (key, tau.task["intent"])
        successes[key].append(tau.success)
    return list(successes.values())


def rate(trajectories: list[Trajectory]) -> dict:
    """Success rate with its interval; the rate is None if there is no valid episode.

    Runs of one task are not independent, so the interval uses an effective sample size. Two limits: it
    treats tasks as independent, so with many tasks of few templates it is too narrow; and where few
    of 20 tasks carry nearly all success, it covers the truth in 85% of cases and not in 95%.
    """
    successes = by_task(trajectories)
    n_tasks = len(successes)
    n = sum(len(of_task) for of_task in successes)
    if n == 0:
        return {"success_rate": None, "ci95": [0.0, 1.0], "n": 0}
    p = sum(sum(of_task) for of_task in successes) / n
    squares = [(mean(of_task) - p) ** 2 for of_task in successes]
    variance = sum(squares) / max(n_tasks - 1, 1)  # of the task means

    # The effective sample size m. There are two formulas for the variance of p:
    #     from the spread of the task means:   variance / n_tasks
    #     from m independent episodes:         p (1 - p) / m
    # Equate them and solve for m: at least one per task, at most one per episode.
    # Without spread the formula divides by 0: then one per task, to be careful.
    effective = n_tasks
    if variance > 0:
        effective = p * (1 - p) * n_tasks / variance
        effective = min(max(effective, n_tasks), n)
    low, high = wilson(p * effective, effective)
    return {"success_rate": p, "ci95": [low, high], "n": n}


def pass_at(trajectories: list[Trajectory]) -> dict[int, float]:
    """{k: chance that one of k runs succeeds}, unbiased, over the tasks with at least k runs.

    The estimator is that of Chen et al. (arXiv 2107.03374): 1 - (ways to draw k failures) / (ways
    to draw k runs).
    """
    successes = by_task(trajectories)
    most = max(map(len, successes), default=0)
    chances = {}
    for k in range(1, most + 1):
        all_fail = []  # for each task, the chance that k of its runs, drawn at random, fail
        for of_task in successes:
            n = len(of_task)
            failures = n - round(sum(of_task))
            if n >= k:
                all_fail.append(math.comb(failures, k) / math.comb(n, k))
        chances[k] = 1 - mean(all_fail)
    return chances


def episode_metrics(trajectories: list[Trajectory]) -> dict:
    """Episodes in numbers, for a training step and for an evaluation.

    episodes, env_errors and env_retries count all episodes; everything else is about the valid ones. turns,
    trajectory_tokens (pages and responses) and exited (a share) are means over episodes, response_tokens is a mean
    over turns. These four are None where there is nothing to average. The rest, beyond `rate`, are counts.
    """
    valid = [tau for tau in trajectories if tau.status == "ok"]
    turns = []
    lengths = []  # of the episodes, in tokens
    for tau in valid:
        turns += tau.turns
        pages = sum(len(turn.message_ids) for turn in tau.turns)
        responses = sum(len(turn.response_ids) for turn in tau.turns)
        lengths.append(pages + responses)
    failed = [turn for turn in turns if turn.error]
    return {
        **rate(trajectories),
        "episodes": len(trajectories),
        "env_errors": len(trajectories) - len(valid),
        "env_retries": sum(bool(tau.fault) for tau in trajectories),
        "turns": mean([len(tau.turns) for tau in valid]),
        "response_tokens": mean([len(turn.response_ids) for turn in turns]),
        "trajectory_tokens": mean(lengths),
        "exited": mean([tau.answer is not None for tau in valid]),
        "truncated": sum(not turn.ended for turn in turns),
        "invalid_actions": sum(not turn.action for turn in failed),
        "failed_actions": sum(bool(turn.action) for turn in failed),
        "pages_cut": sum(turn.page_cut for turn in turns),
    }


def summarize(trajectories: list[Trajectory]) -> dict:
    """summary.json: `episode_metrics`, and success rates by run, site and template."""
    summary = episode_metrics(trajectories)
    judge_free = [tau for tau in trajectories if not webarena.needs_judge(tau.task)]
    if len(judge_free) < len(trajectories):
        summary["judge_free"] = rate(judge_free)
    sound = [tau for tau in trajectories if "flaw" not in tau.task]
    if len(sound) < len(trajectories):
        summary["sound"] = rate(sound)

    members = defaultdict(list)
    sites = defaultdict(list)
    templates = defaultdict(list)
    for tau in trajectories:
        site = " + ".join(tau.task["sites"])
        template = str(tau.task.get("intent_template_id"))
        members[tau.member].append(tau)
        sites[site].append(tau)
        templates[template].append(tau)

    if len(members) > 1:
        rates = [rate(members[member]) for member in sorted(members)]
        summary["runs"] = [one["success_rate"] for one in rates]
        summary["pass_at"] = pass_at(trajectories)
    summary["per_site"] = {name: rate(sites[name]) for name in sorted(sites)}
    summary["per_template"] = {}
    for template, episodes in templates.items():
        text = str(episodes[0].task.get("intent_template") or "")
        summary["per_template"][template] = {"template": text, **rate(episodes)}
    return summary


# ----------------------------------------------------------------------------------------- tables --


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def table(rows: list[tuple[str, dict]]) -> str:
    """[(name, figures of `summarize` or `rate`)] as plain text."""
    width = max(min(len(name), 48) for name, _ in rows)
    lines = [f"{'':{width}}  success     95% interval     n  turns  env errors"]
    for name, row in rows:
        success = percent(row["success_rate"])
        low, high = row["ci95"]
        interval = f"{low:.1%} to {high:.1%}"
        n = row["n"]
        turns = ""
        if row.get("turns") is not None:
            turns = f"{row['turns']:.1f}"
        errors = row.get("env_errors", "")
        line = f"{name:{width}.48}  {success:>7}  {interval:>15}  {n:>4}  {turns:>5}  {errors:>10}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def print_splits(splits: dict[str, dict]):
    rows = []
    for split, summary in splits.items():
        rows.append((split, summary))
        for site, site_rate in summary["per_site"].items():
            rows.append((f"  {site}", site_rate))
        if "judge_free" in summary:
            rows.append(("  without a judge", summary["judge_free"]))
        if "sound" in summary:
            rows.append(("  without flawed tasks", summary["sound"]))
    run.say(table(rows))
    for split, summary in splits.items():
        if "pass_at" in summary:
            each = ", ".join(map(percent, summary["runs"]))
            chances = [f"pass@{k} {percent(chance)}" for k, chance in summary["pass_at"].items()]
            run.say(f"{split}: runs {each}; {', '.join(chances)}")


def compare(directories: list[str]) -> str:
    """The evaluations of several runs in one table, split by split."""
    rows = []
    for directory in directories:
        path = Path(directory) / "summary.json"
        written = run.read_json(path)
        with run.reading(path):
            splits = written["splits"]
            if not splits:
                raise ValueError("it holds no evaluation")
            for split, summary in splits.items():
                rows.append((split, path.parent.resolve().name, summary))
            table(list(splits.items()))  # raises here, while we know the file, if figures are missing
    rows.sort(key=lambda row: row[0])
    longest = max(len(split) for split, _, _ in rows)
    rows = [(f"{split:{longest}}  {name}", summary) for split, name, summary in rows]
    report = run.report(directories[-1], others=directories[:-1])
    return f"{table(rows)}\n{run.with_size(report)}"


# ------------------------------------------------------------------------------------- the script --


@dataclass
class Config(SiteSettings):
    """Every knob is a flag; the comment after it is its help text."""
    # What to do
    model: str | None = None  # checkpoint directory or hub id; None: runs/mgrpo
    policy_url: str | None = None  # or a model at an OpenAI-compatible URL (key: OPENAI_API_KEY)
    policy_model: str = ""  # its name there
    tasks: str = "sandbox:test"  # sandbox:SPLIT[/TEMPLATE][:N], miniwob[:...], infinity:CLONE[...], FILE; or A,B
    out: str = "runs/eval"  # for summary.json, trajectories.jsonl, report.html
    validate: str | None = None  # only say what this task file holds and what is broken in it
    report: bool = False  # only write the report of --out again
    compare: str | None = None  # print the evaluations of these runs (RUN,RUN,...) as a table, and report them
    watch: bool = False  # play in a window, at a person's pace, and print what the policy thinks
    # How to play. A checkpoint of ours remembers its sizes.
    max_turns: list[int] = field(default_factory=lambda: [15])  # per episode; 5,10,15: each in turn
    temperature: float = 0.0  # 0: greedy
    runs: int = 1  # episodes per task; at temperature 0 only the site, or a near tie of tokens, makes them differ
    seed: int = 0  # of sampling, at a temperature above 0
    resume: bool = True  # if this evaluation was interrupted, play only the episodes that are missing


def checkpoint_of(cfg) -> str | None:
    """The checkpoint in use, if only for its chat format and its sizes; None: there is none."""
    if cfg.model:
        return cfg.model
    if cfg.policy_url or cfg.validate or cfg.report or cfg.compare:
        return None
    return "runs/mgrpo"


def open_policy(cfg: Config, device):
    """(the Chat, and the policy as `evaluate` takes it)."""
    checkpoint = checkpoint_of(cfg)
    if checkpoint is not None:
        chat = compress.open_chat(checkpoint, actions_help())
    else:
        # The remote model gets text. The small base's tokenizer only counts tokens for --max-context. It counts
        # about twice as many as a large model's own, so pages are cut at about half of --max-context.
        tokenizer = model.load_tokenizer(Path(__file__).parent / "worlds" / "base")
        chat = Chat(tokenizer, compress.system_prompt(actions_help(), think=True))
    if cfg.policy_url:
        return chat, Endpoint(cfg.policy_url, cfg.policy_model)
    return chat, open_weights(checkpoint, chat, cfg, device)


def open_weights(checkpoint: str, chat: Chat, cfg, device) -> model.Transformer:
    """A checkpoint's policy, to play with. Raises ValueError if it does not fit its tokenizer or --max-context."""
    policy = model.load(checkpoint, model.computing_dtype(device, cfg.precision), device)
    model.check_fit(policy, chat.tokenizer, cfg.max_context)
    return policy


def load_splits(cfg: Config, env: Environment) -> dict[str, list[dict]]:
    """{source in --tasks: its tasks}. Loaded together, so that `task_key` tells equal ids apart."""
    sources = worlds.sources(cfg.tasks)
    for source in sources:
        if sources.count(source) > 1:
            raise ValueError(f"--tasks names {source} twice; --runs 2 plays each of its tasks twice.")
    has_judge = env.judge is not None
    tasks = worlds.load_tasks(cfg.tasks, env.sites, judge=has_judge)
    splits = {}
    for number, source in enumerate(sources):
        of_source = [task for task in tasks if task.get("source", 0) == number]
        if not of_source:
            raise ValueError(f"--tasks {source} leaves no task to play; choose another split or file.")
        splits[source] = of_source
    return splits


def evaluation_key(cfg: Config, sites: dict, tasks: list[dict]) -> str:
    """A hash of everything that an evaluation's episodes depend on, except for our code and the sites' code."""
    settings = asdict(cfg)
    for knob in (*run.PLACE_AND_PACE, "model", "watch", "validate", "report", "compare"):
        settings.pop(knob, None)
    checkpoint = checkpoint_of(cfg)
    path = str(Path(checkpoint or ""))  # one spelling: runs/mgrpo/ is runs/mgrpo
    policy = [path, run.checkpoint_fingerprint(checkpoint)]
    files = run.inputs_of(cfg)["tasks"]
    programs = set()
    for task in tasks:
        if "verify" in task["eval"]["eval_types"]:
            programs.add(task["eval"]["verify"])
    judges = {program: run.fingerprint(program) for program in sorted(programs)}
    addresses = {name: sites[name] for name in webarena.HOSTS if name in sites}
    text = json.dumps([settings, policy, files, judges, addresses])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class Unfinished:
    """The episodes of an evaluation under way. If it is interrupted, the same command plays only the others.

    They lie in OUT/unfinished/KEY/, KEY being `evaluation_key`: with other settings, weights, task files, judges or
    addresses the evaluation starts over. Episodes without a verdict are not kept, so they are played again.
    """

    def __init__(self, directory: run.RunDirectory, cfg: Config, sites: dict, tasks: list[dict]):
        # 1) Read what is there.
        self.folder = directory.path / "unfinished"
        own = self.folder / evaluation_key(cfg, sites, tasks)
        if run.rank() == 0 and not cfg.resume:
            run.delete_directory(own)
        run.barrier()
        files = sorted(own.glob("*.jsonl"))
        self.episodes = {}  # (batch, key of the task, member) -> the episode; of its task only the sentence
        for file in files:
            self.read(file)

        # 2) Name a new file, since the last line of an old one may be cut off. First, all ranks read the old ones.
        run.barrier()
        self.file = own / f"{len(files)}-{run.rank()}.jsonl"
        with run.writing(self.file):
            own.mkdir(parents=True, exist_ok=True)

        # 3) Say what was found.
        if self.episodes:
            run.print0(f"{len(self.episodes)} episodes of this evaluation have been judged already and are not played "
                       "again (--no-resume plays them)")
        elif len(list(self.folder.iterdir())) > 1:
            run.print0("an evaluation that was interrupted here had other settings, weights, tasks or sites; "
                       "its episodes stay until this one has ended")

    def read(self, file: Path):
        """Adds a file's episodes to those that are there."""
        with run.reading(f"{file} (--no-resume does without it)"):
            *lines, _ = file.read_text(encoding="utf-8").split("\n")  # the last is empty, or cut off by a kill
            for line in lines:
                record = json.loads(line)
                place = (record["batch"], record["key"], record["member"])
                episode = record["episode"]
                turns = [Turn(**turn) for turn in episode.pop("turns")]
                self.episodes[place] = Trajectory({"intent": record["intent"]}, turns=turns, **episode)

    def find(self, batch: str, task: dict, member: int) -> Trajectory | None:
        """The episode of a task in a batch, such as a split, if it is there."""
        episode = self.episodes.get((batch, task_key(task), member))
        if episode is None:
            return None
        return replace(episode, task={**task, **episode.task})  # MiniWoB++: the page made up the sentence

    def add(self, batch: str, trajectory: Trajectory):
        """Writes an episode at once, if it has a verdict."""
        if trajectory.status != "ok":
            return
        episode = asdict(trajectory)
        task = episode.pop("task")  # not kept as a whole: it may hold a login
        record = {
            "batch": batch,
            "key": task_key(task),
            "member": trajectory.member,
            "intent": task["intent"],
            "episode": episode,
        }
        with run.writing(self.file), open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, without_verdict: int):
        """Deletes what is saved, unless some episodes have no verdict: then the same command plays only these."""
        if without_verdict:
            run.say(f"episodes without a verdict: {without_verdict}; repeat the command to play only these")
        else:
            run.delete_directory(self.folder)


def write_split(directory: run.RunDirectory, split: str, records: list[dict]):
    """Writes a split's episodes to trajectories.jsonl, in place of an earlier evaluation's."""
    def is_other(line: dict) -> bool:
        return line.get("split") != split

    if run.rank() == 0:
        run.keep_lines(directory.path / "trajectories.jsonl", is_other)
    directory.append("trajectories.jsonl", records)


def evaluate_splits(policy, chat: Chat, env: Environment, cfg: Config, *, directory: run.RunDirectory):
    """Plays every split under every turn limit -> {name: summary}.

    Each split's episodes and figures are written as soon as it has been played; if a later one
    fails, summary.json holds those before it. The figures of all splits together are those of the
    last limit.
    """
    tasks_of = load_splits(cfg, env)
    all_tasks = sum(tasks_of.values(), [])
    env.unfinished = Unfinished(directory, cfg, env.sites, all_tasks)
    summaries = {}
    for limit in cfg.max_turns:
        settings = replace(cfg, max_turns=limit)
        everything = []
        for source, tasks in tasks_of.items():
            split = source
            if len(cfg.max_turns) > 1:
                split = f"{source} within {limit} turns"
            env.begin_batch(tasks, group_size=cfg.runs, name=split)
            tick = run.ticker(f"{split:.48}: ")
            played = evaluate(policy, chat, tasks, env=env, settings=settings, runs=cfg.runs,
                              temperature=cfg.temperature, seed=cfg.seed, tick=tick)
            require_verdicts(played, directory.path)
            records = [to_record(tau, chat, step=None, split=split) for tau in played]
            write_split(directory, split, records)
            summaries[split] = summarize(played)
            everything += played
            total = summarize(everything)
            if len(tasks_of) > 1:
                del total["per_template"]  # two sources may number their templates alike
            summary = {**total, "run": directory.config, "splits": summaries}
            directory.replace("summary.json", summary)  # now: a later split may fail
    return summaries


def may_describe(config: Path) -> bool:
    """Whether config.json is missing or an evaluation's. A checkpoint's describes its training, and stays."""
    if not config.exists():
        return True
    written = run.read_json(config)
    return "run" in written and "model_type" not in written


def main(cfg: Config) -> int | None:
    # 1) What needs no policy.
    if cfg.validate is not None:
        return worlds.validate(cfg.validate)
    if cfg.report:
        print(run.with_size(run.report(cfg.out)))
        return
    if cfg.compare is not None:
        print(compare(cfg.compare.split(",")))
        return

    # 2) Play.
    worlds.check_files(cfg.tasks)
    if cfg.watch:
        cfg = replace(cfg, concurrency=1)  # a person can follow one episode at a time
    device = run.init_dist()
    out = Path(cfg.out)
    claimed = (out / "lock").exists()  # by a run of ours, perhaps in the folder of another program's checkpoint
    if not claimed and not run.holds_run(out):
        run.refuse_foreign(out, ("unfinished", "screenshots", "trajectories.jsonl", "summary.json", "report.html"))
    chat, policy = open_policy(cfg, device)
    directory = run.RunDirectory(cfg.out, run.describe_run(cfg, device))
    directory.claim()
    with worlds.open_sites(cfg.tasks) as sites:
        env = Environment(sites, directory.path, cfg, visible=cfg.watch)
        summaries = evaluate_splits(policy, chat, env, cfg, directory=directory)
    if run.rank() != 0:
        return

    # 3) Show it.
    if may_describe(out / "config.json"):
        directory.replace("config.json", {"run": directory.config})
    report = run.report(directory.path)
    print_splits(summaries)
    run.say(run.with_size(report))
    env.unfinished.finish(sum(summary["env_errors"] for summary in summaries.values()))


if __name__ == "__main__":
    run.command_line(main, Config, __doc__, start=checkpoint_of)
