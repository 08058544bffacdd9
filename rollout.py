"""Episodes: an agent acts in a browser, turn by turn, and one engine decodes for many of them at once.

One turn:   observe (the settled page as text, with element ids) -> respond -> parse -> execute

    - `ACTIONS` defines every action once, for the prompt, the parser and the executor.
    - `Engine` decodes all episodes that wait for a response in one batch. It keeps the keys and values
      of each history between turns, so a turn computes only what its context does not share with the
      context before.
    - The agent's mistakes are data: its next observation says what went wrong (`ActionError`).
    - If the environment fails (`ENV_FAILED`), the episode is played once more. If it fails again, it ends as
      "env_error" and is left out; it does not count as a reward of 0.
    - Equal seeds give equal random numbers: an episode's depend only on (seed, task, member). But the last digits
      of log-probs depend on which episodes share a batch, and that depends on how fast the sites answer. With
      --concurrency 1 every batch is one episode's, and runs are equal bit for bit.

This file knows the browser (worlds/browser.py) as something to observe and to act on. Everything else about a
task (its site, login, judge) is one object, `env`:

    env.enter(chromium, task)     an async context manager: starts the site, logs in, yields the task
    env.earlier(task, member)     the episode that an interrupted evaluation has judged already, or None
    env.prepare(task)             the task is played next: its site may start while an episode is judged
    env.end_prepared()            awaited when all is played: stops sites that were started ahead and not used
    env.watch(session, tau)       awaited after each response, before its action: for pictures
    env.verdict(task, answer, page, why)  awaited once, at the end: 0.0 or 1.0; appends its checks to `why`
    env.keep(tau)                 called with each finished episode
    env.report_blocked(origins)   called when all is played: where pages sent requests that the browser blocked
    env.visible                   whether to play in a window

Words: a worker plays one episode after another. Its number is its slot, its row in the KV cache.

Dimension key: B rows, T tokens, D width, V vocabulary.
"""
import run  # first: it prepares OpenMP before torch loads

import asyncio
import contextlib
import random
import re
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Awaitable, Callable, NamedTuple

import torch

import compress
from compress import Chat, Trajectory, Turn, shared_length
from model import GraphedStep, KVCache, Transformer, sample, unsharded
from worlds.browser import (ENV_FAILED, ActionError, Browser, BrowserSettings, Session, bounded,
                            first_line, readable, sites_of)
from worlds.calls import find_call


@dataclass
class Settings(BrowserSettings):
    """Knobs of a rollout; the scripts' Configs inherit them."""
    max_turns: int = 15            # responses per episode
    max_new_tokens: int = 1024     # tokens per response
    max_context: int = 16384       # tokens of history, page and response together
    concurrency: int = 16          # episodes at once on each rank, each in its own browser context
    cuda_graph: bool = True        # on a GPU: decode with a CUDA graph instead of kernel by kernel
    precision: str | None = None   # float32 or bfloat16; None: bfloat16 on a GPU, else float32

    def __post_init__(self):
        super().__post_init__()
        if self.precision not in (None, "float32", "bfloat16"):
            raise ValueError(f"--precision {self.precision}: use float32 or bfloat16.")
        if self.max_new_tokens >= self.max_context:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} leaves no room for a page within "
                             f"--max-context {self.max_context}; make one smaller or the other larger.")


# --------------------------------------------------------------------------------------- actions --


@dataclass(frozen=True)
class Action:
    help: str
    method: Callable[..., Awaitable[None]] | None  # of Session; None: the action ends the episode
    argument: str = ""     # an example for the prompt; "": the call takes no argument
    element: bool = False  # whether the call needs an element's id
    shorthand: str = ""    # how the call is written instead of do(action=...)


ACTIONS = {
    "Click": Action("click an element", Session.click, element=True),
    "Right Click": Action("click with the right button", Session.right_click, element=True),
    "Type": Action("replace a field's text", Session.type_text, "text", element=True),
    "Search": Action("type into a field and press Enter", Session.search, "text", element=True),
    "Select Dropdown Option": Action("choose an option of a dropdown by its text",
                                     Session.select_option, "option", element=True),
    "Hover": Action("move the mouse over an element", Session.hover, element=True),
    "Scroll Up": Action("scroll up by two thirds of a screen", Session.scroll_up),
    "Scroll Down": Action("scroll down by two thirds of a screen", Session.scroll_down),
    "Press Enter": Action("press Enter in the field used last", Session.press_enter),
    "Switch Tab": Action("go to another tab, counted from 0", Session.switch_tab, "0"),
    "Go Backward": Action("return to the previous page", Session.go_back, shorthand="go_backward()"),
    "Go Forward": Action("undo a go_backward", Session.go_forward, shorthand="go_forward()"),
    "Wait": Action("wait for one second", Session.wait),
    "exit": Action("end the task; the message is the answer, or empty", None,
                   shorthand='exit(message="...")'),
}

# {"go_backward": "Go Backward", ...}: what a call begins with, and the action that it stands for.
SHORTHANDS = {
    action.shorthand.partition("(")[0]: name
    for name, action in ACTIONS.items()
    if action.shorthand
}


@dataclass
class Call:
    """One parsed action. str() gives its canonical form."""
    name: str
    argument: str | None = None
    element: str | int | None = None

    def __str__(self):
        if self.name == "exit":
            return f"exit(message={self.argument!r})"
        parts = [f"action={self.name!r}"]
        if self.argument is not None:
            parts.append(f"argument={self.argument!r}")
        if self.element is not None:
            parts.append(f"element={self.element!r}")
        return f"do({', '.join(parts)})"

    def method_args(self) -> list:
        """The arguments of the action's Session method."""
        values = []
        if self.element is not None:
            values.append(int(self.element))
        if self.argument is not None:
            values.append(self.argument)
        return values


def signature(name: str) -> str:
    """The call as the prompt shows it."""
    action = ACTIONS[name]
    if action.shorthand:
        return action.shorthand
    example = Call(name)
    if action.argument:
        example.argument = action.argument
    if action.element:
        example.element = "12"
    return str(example).replace("'", '"')


def actions_help() -> str:
    """The action list of the system prompt."""
    return "\n".join(f"- {signature(name)}: {action.help}" for name, action in ACTIONS.items())


# ------------------------------------------------------------------------------ reading a response --

ELEMENT_ID = re.compile("[0-9]{1,6}")
BY_LOWER_NAME = {name.lower(): name for name in ACTIONS}  # the benchmark reads "click" as "Click"


def parse(response: str) -> Call:
    """The one call in a response. Raises ActionError with a sentence for the agent."""
    text = compress.action_text(response)
    if text is None:
        raise ActionError("the response has no </answer>; close the answer, and think less if it was cut")
    function, keywords, positional = find_call(text, functions=("do", *SHORTHANDS))

    # 1) The action: the function names it, or the keyword, or the first value.
    name = SHORTHANDS.get(function) or keywords.pop("action", "")
    if not name and positional:
        name = positional.pop(0)
    name = BY_LOWER_NAME.get(name.strip().lower(), name)
    if name not in ACTIONS:
        raise ActionError(f"unknown action {name!r:.80}; use one of: {', '.join(ACTIONS)}")

    # 2) The answer of an exit: its message, or else its only text, whatever the keyword is called.
    if name == "exit":
        keywords.pop("element", None)
        values = [*positional, *keywords.values()]
        if keywords.get("message"):
            values = [*positional, keywords["message"]]
        texts = [value for value in values if value]
        if len(texts) > 1:  # such as exit(1,200)
            raise ActionError('exit takes one text; write all of the answer in exit(message="...")')
        return Call("exit", argument="".join(texts))

    # 3) What the action needs. Anything else in the call is ignored. The id may be written as pages show it,
    #    element="<12>".
    action = ACTIONS[name]
    call = Call(name)
    if action.element:
        call.element = keywords.get("element", "").strip("<>[]# ")
        if not ELEMENT_ID.fullmatch(call.element):
            raise ActionError(f"{name} needs the id of an element, as in {signature(name)}")
    if action.argument:
        if "argument" not in keywords:
            raise ActionError(f"{name} needs an argument, as in {signature(name)}")
        call.argument = keywords["argument"]
    return call


# ------------------------------------------------------------------------------------ the engine --


@dataclass
class Request:
    """One response that an episode waits for."""
    slot: int
    context_ids: list[int]
    rng: random.Random  # this episode's own
    response_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def newest_id(self) -> int:
        """The last id of context and response together; the next pass computes its keys."""
        if self.response_ids:
            return self.response_ids[-1]
        return self.context_ids[-1]


CHUNK = 2048  # ids of one prefill pass: bounds its memory


def no_logits(x_BTD):
    """The `head` of a prefill, which only fills the cache. It may return a view: here the model is `unsharded`."""
    return x_BTD[:, :0]


class Engine:
    """Continuous batching: prefill new requests, decode one token for all running ones, repeat.

    It knows token ids only. Each worker owns a cache slot, which keeps its keys and values between turns.
    A context begins like the previous turn's, up to that turn's page, which is a placeholder now. Before the
    response of turn 2 (turns count from 0):

        held:   system  s'_0 a_0  [whole page 1]  a_1
        next:   system  s'_0 a_0  [placeholder ]  a_1  [whole page 2]
                ----- kept -----  ----------- computed again ----------

    If another slot holds more of a context, its keys and values are copied: episodes of one task begin with the same
    page.
    length: the most ids that a context and its response have together.
    """

    def __init__(self, model: Transformer, end_id: int, *, n_slots: int, length: int, max_new_tokens: int,
                 temperature: float = 1.0, cuda_graph: bool = False):
        weight = model.model.embed_tokens.weight
        self.model = model
        self.end_id = end_id
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.device = weight.device
        self.cache = KVCache(model.config, n_slots, length, dtype=weight.dtype, device=weight.device)
        self.graphed = None
        if cuda_graph and self.device.type == "cuda":
            self.graphed = GraphedStep(model, self.cache)
        self.held: list[list[int]] = [[] for _ in range(n_slots)]  # ids whose keys are in the cache: all but the newest
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.arrived = asyncio.Event()

    async def respond(self, ids: list[int], slot: int, rng: random.Random):
        """Samples a response to the context `ids` -> (ids, logps, whether it ended by itself).

        logps: the log-prob in nats of each of its ids, at the sampling temperature.
        """
        request = Request(slot, ids, rng)
        self.waiting.append(request)
        self.arrived.set()
        await request.complete.wait()
        return request.response_ids, request.logps, request.newest_id == self.end_id

    async def serve(self):
        """Runs until cancelled. Forward passes run in a thread, so no browser waits for them."""
        loop = asyncio.get_running_loop()
        # A single thread keeps one cuBLAS workspace. Leaving this block waits for the pass under way;
        # after that, weights may be sharded again.
        with ThreadPoolExecutor(1, "forward", initializer=self.enter_thread) as thread:
            while True:
                # 1) Wait for work.
                if not self.waiting and not self.running:
                    self.arrived.clear()
                    await self.arrived.wait()

                # 2) Prefill the requests that have come, one by one.
                while self.waiting:
                    request = self.waiting.popleft()
                    await loop.run_in_executor(thread, self.prefill, request)
                    self.running.append(request)

                # 3) Decode one token for all; wake those whose response is complete.
                done = await loop.run_in_executor(thread, self.decode)
                for request in done:
                    self.running.remove(request)
                    request.complete.set()

    def enter_thread(self):
        if self.device.type == "cuda":  # a new thread would compute on the first GPU
            torch.cuda.set_device(self.device)

    @torch.no_grad()  # holds for one thread only, so it is set in the thread that computes
    def prefill(self, request: Request):
        """Brings the slot to hold all of the context but its last token, which `decode` feeds."""
        slot = request.slot
        ids = request.context_ids[:-1]

        # 1) Keep the longest prefix that any slot holds; the positions after it get overwritten. Another slot may hold
        #    more than this one: the system prompt, or the first page of an episode of the same task.
        prefixes = [shared_length(held, ids) for held in self.held]  # how many of these ids each slot holds
        kept = max(prefixes)
        if kept > prefixes[slot]:
            other = prefixes.index(kept)
            for part in (self.cache.k, self.cache.v):
                part[:, slot, :, :kept] = part[:, other, :, :kept]

        # 2) Compute the rest. No logits are needed.
        for start in range(kept, len(ids), CHUNK):
            stop = min(start + CHUNK, len(ids))
            tokens_BT = torch.tensor([ids[start:stop]], device=self.device)
            positions_BT = torch.arange(start, stop, device=self.device)[None]
            self.model(tokens_BT, positions_BT, self.cache, slots=slice(slot, slot + 1),
                       head=no_logits)
        self.held[slot] = ids

    @torch.no_grad()
    def decode(self) -> list[Request]:
        """Samples one token for every running request; returns those that are complete."""
        # 1) The rows: every slot from the first running one to the last, because a slice of the cache needs no
        #    copy. Idle slots among them write to a position that nobody reads. A graph always has all slots.
        running_slots = [request.slot for request in self.running]
        low = min(running_slots)
        high = max(running_slots)
        if self.graphed:
            low = 0
            high = self.cache.n_slots - 1
        slots = slice(low, high + 1)
        n_rows = high + 1 - low

        # 2) The inputs: each request's last token, its position, and a random number.
        tokens = [0] * n_rows
        uniform = [0.0] * n_rows
        for request in self.running:
            row = request.slot - low
            tokens[row] = request.newest_id
            uniform[row] = request.rng.random()
        positions = [len(held) for held in self.held[slots]]
        tokens_B1 = torch.tensor(tokens, device=self.device)[:, None]
        positions_B1 = torch.tensor(positions, device=self.device)[:, None]
        uniform_B = torch.tensor(uniform, dtype=torch.float64, device=self.device)  # see `sample`

        # 3) Forward and sample.
        if self.graphed:
            logits_BV = self.graphed(tokens_B1, positions_B1, max(positions))
        else:
            logits_BV = self.model(tokens_B1, positions_B1, self.cache, slots=slots,
                                   head=self.model.last_logits)
        ids_B, logp_B = sample(logits_BV, uniform_B, self.temperature)
        ids = ids_B.tolist()
        logps = logp_B.tolist()

        # 4) Hand out.
        complete = []
        for request in self.running:
            row = request.slot - low
            self.held[request.slot].append(tokens[row])
            request.response_ids.append(ids[row])
            request.logps.append(logps[row])
            ended = ids[row] == self.end_id
            full = len(request.response_ids) == self.max_new_tokens
            if ended or full:
                complete.append(request)
        return complete


# -------------------------------------------------------------------------------------- episodes --

Response = tuple[list[int], list[float], bool]  # its ids, their log-probs, whether it ended by itself
# act(trajectory, slot): awaited for the last turn's response, by a model or an expert
Act = Callable[[Trajectory, int], Awaitable[Response]]


def to_hosts(text: str, task: dict) -> str:
    """WebArena: what the policy reads has the benchmark's hosts in place of the sites' real addresses."""
    for host, address in task.get("hosts", {}).items():
        text = text.replace(address, f"http://{host}")
    return text


def to_addresses(text: str, task: dict) -> str:
    """The other way round: what the policy writes, with the real addresses."""
    for host, address in task.get("hosts", {}).items():
        text = text.replace(f"http://{host}", address)
    return text


async def take_turns(session: Session, chat: Chat, trajectory: Trajectory, env, act: Act,
                     settings: Settings, slot: int):
    """Observes and acts until the agent exits, uses up its turns, or fills the context."""
    budget = settings.max_context - settings.max_new_tokens
    while len(trajectory.turns) < settings.max_turns and trajectory.answer is None:
        # 1) Observe. What went wrong with the last action comes first.
        url, page = await session.observe()
        if trajectory.turns and trajectory.turns[-1].error:
            page = f"error: {trajectory.turns[-1].error}\n{page}"
        page = to_hosts(page, trajectory.task)
        fitted = compress.fit_page(chat, trajectory, page, budget)
        if fitted is None:
            return  # the history leaves no room for a page: this is the end, as at the turn limit
        ids, shown, cut = fitted
        turn = Turn(url, shown, ids, response_ids=[], logps=[], response="", page_cut=cut)
        trajectory.turns.append(turn)

        # 2) Respond.
        turn.response_ids, turn.logps, turn.ended = await act(trajectory, slot)
        turn.response = chat.decode(turn.response_ids)
        await env.watch(session, trajectory)

        # 3) Act.
        response = to_addresses(turn.response, trajectory.task)
        try:
            call = parse(response)
            turn.action = str(call)
            if call.name == "exit":
                trajectory.answer = call.argument
            else:
                method = ACTIONS[call.name].method
                await session.execute(call.name, method, *call.method_args())
        except ActionError as problem:
            turn.error = str(problem)


async def episode(browser: Browser, chat: Chat, task: dict, env, act: Act, settings: Settings, *,
                  member: int, slot: int, before_verdict=run.ignore) -> Trajectory:
    """Plays one task to its end and judges it once. Neither the environment nor the agent makes it raise.

    before_verdict(): called between the last turn and the verdict.
    """
    trajectory = Trajectory(task, member)
    timeout = settings.timeout
    try:
        async with contextlib.AsyncExitStack() as stack:
            # 1) Start the site, log in, and open the start page. `timeout` is for one page; opening and judging
            #    may load several, so they get a multiple of it.
            await browser.revive()
            task = await stack.enter_async_context(env.enter(browser, task))
            trajectory.task = task
            opening = browser.open(task)
            session = await bounded(opening, 3 * timeout, f"opening {task['start_url']}")
            stack.push_async_callback(session.close)
            if "intent_from" in task:  # MiniWoB++: the page makes up its task
                intent = await session.run_script(task["intent_from"])
                trajectory.task = {**task, "intent": readable(intent)}

            # 2) Play.
            await take_turns(session, chat, trajectory, env=env, act=act, settings=settings, slot=slot)

            # 3) Judge. First observe once more: it waits for what the last action loads, and goes back if the browser
            #    shows an error page.
            before_verdict()
            await session.observe()
            session.private = []  # the judge may open what the agent may not
            judging = env.verdict(trajectory.task, trajectory.answer, session.page, trajectory.checks)
            trajectory.success = await bounded(judging, 10 * timeout, "judging the episode")
            trajectory.reward = trajectory.success
    except ENV_FAILED as problem:
        trajectory.status = "env_error"
        trajectory.checks = [["environment", False, first_line(problem)]]
        trajectory.success = trajectory.reward = 0.0  # if it broke after its verdict
    return trajectory


class Job(NamedTuple):
    """One episode to play."""
    number: int  # its place among all
    task: dict
    member: int  # its index within its group


def check_room(chat: Chat, tasks: list[dict], settings: Settings):
    """Raises ValueError if the system prompt or a task's sentence leaves no room for a page."""
    budget = settings.max_context - settings.max_new_tokens
    n_system = len(chat.system_ids())
    if n_system >= budget:
        raise ValueError(f"--max-context {settings.max_context} leaves no room for a page: the system "
                         f"prompt has {n_system} tokens, a response {settings.max_new_tokens}.")
    for task in tasks:
        # The shortest page that is ever shown: nothing but the mark of a cut.
        if compress.fit_page(chat, Trajectory(task), page=compress.CUT, budget=budget) is None:
            raise ValueError(f"--max-context {settings.max_context} leaves no room for a page: the sentence of "
                             f"task {task['task_id']} is too long.")


async def play(act: Act, chat: Chat, tasks: list[dict], env, settings: Settings, *,
               group_size: int = 1, tick=run.ignore) -> list[Trajectory]:
    """Plays every task `group_size` times, settings.concurrency at once. Ordered by task, then member."""
    check_room(chat, tasks, settings)
    jobs = []
    episodes = []  # in the order of their numbers; None: not played yet
    for task in tasks:
        for member in range(group_size):
            judged = env.earlier(task, member)
            if judged is None:
                jobs.append(Job(len(episodes), task, member))
            episodes.append(judged)
    queue = iter(jobs)  # all workers draw from it
    played = []  # in the order in which they end
    start = time.monotonic()

    async def work(browser, slot):
        """Plays jobs until none is left."""
        upcoming = None  # the job that this worker plays next, once it has drawn it

        def draw_ahead():
            """Draws the next job before the verdict on the present one: its site can start meanwhile."""
            nonlocal upcoming
            if upcoming is not None:
                return  # drawn in the attempt before
            upcoming = next(queue, None)
            if upcoming is not None:
                env.prepare(upcoming.task)

        job = next(queue, None)
        while job is not None:
            # 1) Play it.
            attempt = partial(episode, browser, chat, job.task, env, act, settings,
                              member=job.member, slot=slot, before_verdict=draw_ahead)
            trajectory = await with_retry(attempt)
            episodes[job.number] = trajectory
            env.keep(trajectory)

            # 2) Say how far we are, and go on.
            played.append(trajectory)
            seconds = time.monotonic() - start
            line = progress(played, total=len(jobs), seconds=seconds)
            tick(line, last=len(played) == len(jobs))
            draw_ahead()  # not drawn yet if no attempt came to its verdict
            job = upcoming
            upcoming = None

    sites = sites_of(tasks, settings.allow)
    async with Browser(settings, sites, visible=env.visible) as browser:
        n_workers = min(settings.concurrency, len(jobs))
        workers = [asyncio.ensure_future(work(browser, slot)) for slot in range(n_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            # Wait until all workers have stopped: until then one could prepare another site.
            await asyncio.gather(*workers, return_exceptions=True)
            await env.end_prepared()
    env.report_blocked(browser.stopped)
    return episodes


async def with_retry(attempt) -> Trajectory:
    """Plays an episode, and once more if the environment failed: most failures are transient."""
    trajectory = await attempt()
    if trajectory.status != "ok":
        fault = trajectory.broken_by
        trajectory = await attempt()
        trajectory.fault = fault
    return trajectory


def progress(played: list[Trajectory], total: int, seconds: float) -> str:
    """One line: how far, how well, how fast, and how the environment failed."""
    ok = [tau for tau in played if tau.status == "ok"]
    success = sum(tau.success for tau in ok) / max(len(ok), 1)
    turns = sum(len(tau.turns) for tau in played)
    done = len(played)
    left = seconds * (total / done - 1)
    parts = [f"{done}/{total} episodes ({100 * done // total}%), success {success:.0%}, "
             f"{turns / seconds:.1f} turns/s, {left:.0f} s left, env errors {done - len(ok)}"]

    faults = [tau.fault for tau in played if tau.fault]
    faults += [tau.broken_by for tau in played if tau.status != "ok"]
    # Without addresses, so that equal faults of different pages are counted together.
    kinds = Counter(re.sub(r"( at)? http\S+", "", fault) for fault in faults)
    for kind, count in kinds.most_common():
        parts.append(f"{count} x {kind}")
    return "; ".join(parts)


# --------------------------------------------------------------------- episodes played by a model --


def task_key(task: dict) -> str:
    """A task's name, unique within a run: two sources may use the same id."""
    if "source" in task:
        return f"{task['source']}:{task['task_id']}"
    return str(task["task_id"])


@contextlib.contextmanager
def half_the_threads():
    """Leaves torch half of its threads: the browser needs the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


async def rollout(model: Transformer, chat: Chat, tasks: list[dict], env, settings: Settings, *,
                  group_size: int = 1, seed: int | str = 0, temperature: float = 1.0, choose=None,
                  tick=run.ignore) -> list[Trajectory]:
    """`play` with the model as policy. Random numbers depend only on (seed, task, member).

    choose(trajectory, draw): for a fork that awaits several draws, one after the other, and returns
    one of them (forks/tsr.py).
    """
    with half_the_threads(), unsharded(model) as whole:
        n_slots = min(settings.concurrency, len(tasks) * group_size)  # each takes gigabytes of cache
        engine = Engine(whole, chat.end_id, n_slots=n_slots, length=settings.max_context,
                        max_new_tokens=settings.max_new_tokens, temperature=temperature,
                        cuda_graph=settings.cuda_graph)
        rngs: dict[int, random.Random] = {}  # slot -> the random numbers of its episode

        async def act(trajectory: Trajectory, slot: int):
            j = len(trajectory.turns) - 1
            if j == 0:
                rngs[slot] = random.Random(f"{seed}/{task_key(trajectory.task)}/{trajectory.member}")
            h_j = compress.context(chat, trajectory, j)

            def draw():
                return engine.respond(h_j, slot, rngs[slot])

            if choose is None:
                return await draw()
            return await choose(trajectory, draw)

        playing = asyncio.ensure_future(
            play(act, chat, tasks, env=env, settings=settings, group_size=group_size, tick=tick))
        serving = asyncio.ensure_future(engine.serve())
        both = [playing, serving]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()  # the engine ends only by raising
        finally:
            playing.cancel()
            serving.cancel()
            await asyncio.wait(both)
            # Frees memory even if something still holds the engine.
            engine.cache = None
            engine.graphed = None


if __name__ == "__main__":  # python rollout.py URL "a task"
    import one_task  # not at the top: it imports evaluate.py, which imports this file
    one_task.command_line()
