"""One task from the command line: a policy plays it, or you do.

    python rollout.py http://127.0.0.1:7770/ "set my city to Oslo" --model runs/mgrpo --watch
    python rollout.py http://127.0.0.1:7770/ "set my city to Oslo" --by-hand
    python rollout.py http://127.0.0.1:7770/ "set my city to Oslo" --record demos.jsonl
    python rollout.py "http://127.0.0.1:{port}/" "set my city to Oslo" --serve "python3 site.py {port}"

--by-hand prints each page as a policy reads it, and you type the actions. It needs no display.

--record opens a window, and you do the task. Whatever you click, type or choose is carried out as an
action of the agent, on an element of the page as the agent reads it (worlds/recorder.js says how to
use the window). When you are done, close the window and type the answer. Then, without a window,

    1. nothing is done, to see what the site looks like;
    2. your steps are replayed. What is different now (the state of the site, the address, your answer)
       gives checks that may fit;
    3. each is tried, until one passes a replay of your steps and fails when nothing is done. Then the
       demonstration is appended to demos.jsonl (python bc.py --data demos.jsonl) and the task, with this
       check, to demos.tasks.json. Look at the check: it may ask for too much or too little.

Between the replays a site must forget what was done. Start it by --serve, so that each gets a fresh copy.
"""
import run  # first: it prepares OpenMP before torch loads

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

from compress import Chat, Trajectory, format_response, open_chat, to_record
from evaluate import Environment, SiteSettings, evaluate_js, open_weights, visit
from rollout import ACTIONS, Call, Settings, actions_help, play, rollout
from worlds import onlooker, recorder, webarena
from worlds.browser import ENV_FAILED, ActionError, Browser, EnvError, first_line, sites_of


@dataclass
class Config(Settings):
    """Every knob is a flag; the comment after it is its help text."""
    concurrency: ClassVar[int] = 1  # one task: no flag
    url: str = ""  # where the task starts; with --serve it holds {port}
    task: str = ""  # what to do, in a sentence
    model: str = ""  # checkpoint directory or hub id (default: runs/mgrpo; with --record or --by-hand worlds/base)
    watch: bool = False  # play in a window, at a person's pace
    by_hand: bool = False  # type the actions yourself; each page is shown as a policy reads it
    record: str | None = None  # show it yourself, in a window; the demonstration goes into this file
    serve: str | None = None  # the command that starts the site, such as "python3 site.py --port {port}"
    cwd: str = "."  # the folder in which that command runs
    storage_state: str | None = None  # a saved login, as `playwright open --save-storage FILE` writes it
    temperature: float = 0.0  # 0: greedy
    seed: int = 0  # of sampling, at a temperature above 0


OUT_DIR = "runs/one-task"  # of servers.log


def checkpoint_of(cfg) -> str:
    if cfg.model:
        return cfg.model
    if cfg.record or cfg.by_hand:
        return "worlds/base"
    return "runs/mgrpo"


def task_of(cfg: Config) -> dict:
    """The task in WebArena's schema, with a placeholder check. Raises ValueError."""
    try:
        host = urlsplit(cfg.url).hostname
    except ValueError as error:
        raise ValueError(f"{cfg.url} is no address: {error}.") from None
    row = {
        "task_id": 0,
        "sites": [host or "site"],
        "intent": cfg.task,
        "start_url": cfg.url,
        "storage_state": cfg.storage_state,
        "eval": {"eval_types": ["url_match"], "reference_url": cfg.url},
    }
    if cfg.serve:
        row.update(serve=cfg.serve, cwd=cfg.cwd)
    elif "{port}" in cfg.url:
        raise ValueError(f"{cfg.url}: {{port}} stands for the port of a site that --serve starts; give --serve.")
    tasks, _, faults = webarena.check_rows([row], Path())
    if faults:
        problem = faults[0].partition(": ")[2]  # without the number of its row
        raise ValueError(f"{problem}.")
    webarena.check_reach(tasks, {})
    return tasks[0]


# ------------------------------------------------------------------------------- a policy plays it --


class Unjudged(Environment):
    """For an episode that nobody judges."""

    async def verdict(self, task: dict, answer: str | None, page, why: list) -> float:
        return 0.0


class Narrated(Unjudged):
    """Prints what the agent thinks and does."""

    async def watch(self, session, trajectory: Trajectory):
        if not self.visible:
            onlooker.tell(trajectory)
        await super().watch(session, trajectory)


def ending(trajectory: Trajectory, cfg: Config) -> str:
    """Why an episode ended."""
    if trajectory.status != "ok":
        return f"the environment failed: {trajectory.broken_by}"
    if trajectory.answer is not None:
        return f"the agent exited; its answer: {trajectory.answer or '(none)'}"
    if len(trajectory.turns) == cfg.max_turns:
        return f"the agent used up its {cfg.max_turns} turns (--max-turns)"
    return "the history filled the context (--max-context)"


def play_once(cfg: Config, task: dict):
    checkpoint = checkpoint_of(cfg)
    device = run.init_dist()
    chat = open_chat(checkpoint, actions_help())
    policy = open_weights(checkpoint, chat, cfg, device)
    env = Narrated({}, OUT_DIR, SiteSettings(timeout=cfg.timeout), visible=cfg.watch)
    playing = rollout(policy, chat, [task], env=env, settings=cfg, seed=cfg.seed,
                      temperature=cfg.temperature)
    [trajectory] = asyncio.run(playing)
    print(f"\n== after {len(trajectory.turns)} turns {ending(trajectory, cfg)}")


# ------------------------------------------------------------------------- a person plays it, by text --


def play_by_hand(cfg: Config, task: dict):
    """Prints each page as a policy reads it, and carries out the line that you type."""
    chat = open_chat(checkpoint_of(cfg), actions_help())

    async def act(trajectory: Trajectory, slot: int):
        turn = trajectory.turns[-1]
        print(f"\n-- turn {len(trajectory.turns)}: {turn.url}\n{onlooker.harmless(turn.observation)}\n")
        response = ask("> ")  # the page runs on meanwhile; this process waits
        return chat.encode(response or "exit()"), [], True

    env = Unjudged({}, OUT_DIR, SiteSettings(timeout=cfg.timeout), visible=cfg.watch)
    settings = replace(cfg, max_turns=1000)  # a person says when it ends
    print(f"{actions_help()}\nType one call a line. An empty line exits.")
    [trajectory] = asyncio.run(play(act, chat, [task], env=env, settings=settings))
    print(f"\n== after {len(trajectory.turns)} turns {ending(trajectory, settings)}")


# --------------------------------------------------------------------------------- a person shows it --

ELEMENT_TAG = re.compile(r"<([^<>]+)>([^<]*) <([0-9]+)>")  # up to its id, as worlds/page/ writes it

THOUGHTS = {  # in the phrases of the sandbox's experts
    "Click": "click {name}",
    "Right Click": "click {name} with the right button",
    "Hover": "hover over {name}",
    "Type": "type {argument} into {name}",
    "Search": "search for {argument}",
    "Select Dropdown Option": "choose {argument} as {name}",
    "Press Enter": "press enter",
    "Scroll Up": "scroll up",
    "Scroll Down": "scroll down",
    "Go Backward": "go back",
    "Go Forward": "go forward",
    "Switch Tab": "go to tab {argument}",
    "Wait": "wait",
}


class Step(NamedTuple):
    """An action. Its element is known by tag and name, since its id may differ in the next episode."""
    action: str
    argument: str | None
    tag: str   # of the element; "": the action needs none
    name: str
    nth: int   # how many elements of this tag and name stand above it

    def thought(self) -> str:
        return THOUGHTS[self.action].format(name=self.name, argument=self.argument)


def step_of(wish: recorder.Wish, page: str) -> Step:
    """What a person wished, as a step. page: the observation whose ids the wish uses."""
    above = Counter()
    for tag, name, number in ELEMENT_TAG.findall(page):
        if int(number) == wish.element:
            return Step(wish.name, wish.argument, tag, name, above[tag, name])
        above[tag, name] += 1
    return Step(wish.name, wish.argument, tag="", name="", nth=0)


def find(step: Step, page: str) -> str | None:
    """The id of a step's element on a page; None: it is not there."""
    same = []
    for tag, name, number in ELEMENT_TAG.findall(page):
        if tag == step.tag and name == step.name:
            same.append(number)
    if step.nth >= len(same):
        return None
    return same[step.nth]


async def watch_person(task: dict, env: Environment, cfg: Config) -> tuple[list[Step], str]:
    """(what a person did in a window until it was closed, the address of the last page)."""
    steps = []
    sites = sites_of([task], cfg.allow)
    async with Browser(cfg, sites, visible=True) as browser, env.enter(browser, task) as served:
        session = await browser.open({**served, "script": recorder.SCRIPT})
        person = recorder.Person(session)
        print(f"The task: {task['intent']}\nDo it in the window, then close the window.")
        while True:
            try:
                url, page = await session.observe()
                wish = await person.next()
            except ENV_FAILED:
                if not await person.is_gone():
                    raise
                url = session.page.url  # the window was closed meanwhile
                break
            if wish is None:
                break
            step = step_of(wish, page)
            call = Call(wish.name, wish.argument, wish.element)
            action = ACTIONS[call.name].method
            try:
                await session.execute(call.name, action, *call.method_args())
            except ActionError as problem:
                print(f"   {problem}")
                continue
            steps.append(step)
            print(f"{len(steps):>2}. {step.thought()}")
    return steps, without_port(url, served)


def without_port(url: str, served: dict) -> str:
    """An address of a task that was played, with {port} again in place of its server's port."""
    if "serve" not in served:
        return url
    port = urlsplit(served["start_url"]).port
    return re.sub(rf":{port}\b", ":{port}", url)


# ---------------------------------------------------------------------------- replayed, and checked --


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def response_to(step: Step, page: str, chat: Chat) -> str | None:
    """The response that carries out a step; None: its element is not on the page."""
    parts = [f"action={quoted(step.action)}"]
    comment = ""
    if step.argument is not None:
        parts.append(f"argument={quoted(step.argument)}")
    if step.tag:
        number = find(step, page)
        if number is None:
            return None
        parts.append(f"element={quoted(number)}")
        comment = f"# Element: {step.name} <{number}>\n"
    return format_response(step.thought(), f"{comment}do({', '.join(parts)})", chat.think)


class Replay:
    """A policy that carries out steps and then exits with an answer."""

    def __init__(self, steps: list[Step], answer: str, chat: Chat):
        self.steps = steps
        self.answer = answer
        self.chat = chat
        self.lost = None  # a step whose element was not there

    async def act(self, trajectory: Trajectory, slot: int):
        """The next response as Engine.respond gives it: (ids, log-probs, ended). It has no log-probs."""
        *earlier, now = trajectory.turns
        j = len(earlier)
        response = None
        if j < len(self.steps):
            step = self.steps[j]
            response = response_to(step, now.observation, self.chat)
            if response is None:
                self.lost = step
        if response is None:  # all steps are done, or one is lost
            response = self.leave()
        ids = self.chat.encode(response, tags=True)
        return [*ids, self.chat.end_id], [], True

    def leave(self) -> str:
        """The response that exits with the answer."""
        thought = "all is done"
        if self.answer:
            thought = f"the answer is {self.answer}"
        message = quoted(self.answer or "done")
        return format_response(thought, f"exit(message={message})", self.chat.think)


# Between the cells of a table it has tabs, and pages write spaces that do not break.
TEXT = r"document.body.innerText.replace(/[^\S\n]+/g, ' ')"
# What a page's elements are set to, where no text says it: {JavaScript that reads it: the value}.
SETTINGS = """Object.fromEntries([...document.querySelectorAll('[id], [name]')].flatMap(el => {
  const given = key => Element.prototype.getAttribute.call(el, key);  // in a form, el.id may be a field
  const id = given('id'), name = given('name');
  if (!id && !name) return [];
  const selector = id ? `#${CSS.escape(id)}` : `[name=${CSS.escape(name)}]`;
  const read = `document.querySelector(${JSON.stringify(selector)})`;
  return ['value', 'checked', 'ariaChecked', 'ariaPressed', 'ariaSelected', 'className']
    .filter(key => el.type !== 'hidden' && /^(string|boolean)$/.test(typeof el[key]))
    .map(key => [`${read}.${key}`, String(el[key])]);
}))"""


class Snapshot(Environment):
    """Looks at what an episode leaves instead of judging it.

    Afterwards url and shown (its lines) describe the page left open; state (its lines) and settings describe
    the page at `address`, loaded again.
    """

    def __init__(self, *given, address: str):
        """address: a page of the site, loaded again when the episode has ended."""
        super().__init__(*given)
        self.address = address

    async def verdict(self, task: dict, answer: str | None, page, why: list) -> float:
        self.url = without_port(page.url, task)
        self.shown = await text_of(page)
        port = urlsplit(task["start_url"]).port
        await visit(page, self.address.replace("{port}", str(port)))
        self.state = await text_of(page)
        self.settings = await read(page, SETTINGS)
        return 0.0


async def read(page, expression: str):
    """The value of JavaScript in a page. Raises EnvError if there is none, as in a picture or while a page reloads."""
    try:
        return await evaluate_js(page, expression)
    except LookupError as error:
        raise EnvError(f"{page.url} cannot be read ({error})") from None


async def text_of(page) -> list[str]:
    text = await read(page, TEXT)
    return [line.strip() for line in text.splitlines()]


def news(before: list[str], after: list[str], typed: list[str]) -> list[str]:
    """At most two lines that only `after` has: those with something that was typed, if there are any.

    A line with a time of day counts only if that time was typed: other times differ from replay to replay.
    """
    def was_typed(time: str) -> bool:
        return any(time in text for text in typed)

    with_typed = []
    others = []
    for line in after:
        if line in before + with_typed + others:
            continue
        times = re.findall(r"\d+:\d\d", line)
        if not all(map(was_typed, times)):
            continue
        if any(text in line for text in typed):
            with_typed.append(line)
        elif 2 < len(line) < 120:
            others.append(line)
    best = with_typed or others
    return best[:2]


def possible_checks(untouched: Snapshot, finished: Snapshot, answer: str, typed: list[str]) -> list[dict]:
    """Checks ("eval") that may tell the finished task from an untouched site, the best first."""
    answers = {"eval_types": ["string_match"], "reference_answers": {"must_include": [answer]}}

    def on_page(url: str, locator: str, contents: dict) -> dict:
        target = {"url": url, "locator": locator, "required_contents": contents}
        check = {"eval_types": ["program_html"], "program_html": [target]}
        if answer:
            check = {**answers, **check, "eval_types": ["string_match", "program_html"]}
        return check

    possible = []
    state = news(untouched.state, finished.state, typed)
    gone = news(finished.state, untouched.state, typed=[])
    if state:
        possible.append(on_page(finished.address, TEXT, {"must_include": state}))
    elif gone:
        contents = {"must_exclude": gone}
        above = untouched.state[:untouched.state.index(gone[0])]
        common = [line for line in above if line in finished.state]
        stays = [line for line in common if 2 < len(line) < 120 and not re.search(r"\d", line)]
        if stays:  # a page that asks for a login, or is not there, lacks what stands above, such as a heading
            contents["must_include"] = stays[-1:]
        possible.append(on_page(finished.address, TEXT, contents))
    for locator, value in finished.settings.items():
        if untouched.settings.get(locator, value) != value:
            possible.append(on_page(finished.address, locator, {"exact_match": value}))
            break
    if answer:
        possible.append(answers)
    elif finished.url != untouched.url:
        possible.append({"eval_types": ["url_match"], "reference_url": finished.url})
    shown = news(untouched.shown, finished.shown, typed)
    if shown:
        possible.append(on_page("last", TEXT, {"must_include": shown}))
    return possible


def record(cfg: Config, task: dict):
    """Lets a person show the task; keeps the demonstration and the task if a replay passes its check."""
    chat = open_chat(checkpoint_of(cfg), actions_help())
    onlooker.require_display("--record", "record on a machine that has one, or write a script (assets/your_site.md)")
    read_tasks(Path(cfg.record))  # raises before a person has worked, not after
    if not cfg.serve:
        print("Without --serve the site is not started afresh. If it keeps what you do now, the replays find "
              "it done already, and the check will be wrong: look at it.")
    site = SiteSettings(timeout=cfg.timeout)
    watching = watch_person(task, Environment({}, OUT_DIR, site), cfg)
    try:
        steps, address = asyncio.run(watching)
    except ENV_FAILED as error:
        raise ValueError(f"nothing was recorded: the environment failed ({first_line(error)}).") from None
    answer = ask("The answer, if the task asks for one: ")
    settings = replace(cfg, max_turns=len(steps) + 1)

    def replay_once(steps: list[Step], answer: str, env: Environment, check: dict | None = None) -> Trajectory:
        policy = Replay(steps, answer, chat)
        checked = {**task, "eval": check or task["eval"]}
        playing = play(policy.act, chat, [checked], env=env, settings=settings)
        [trajectory] = asyncio.run(playing)
        require_complete(trajectory, policy, cfg)
        return trajectory

    def look_after(steps: list[Step], answer: str) -> Snapshot:
        env = Snapshot({}, OUT_DIR, site, address=address)
        replay_once(steps, answer, env)
        return env

    # 1) What the site looks like when nothing was done.
    untouched = look_after([], "")

    # 2) What it looks like after these steps.
    finished = look_after(steps, answer)

    # 3) The first check that passes a replay, and does not pass when nothing is done.
    typed = [step.argument for step in steps if step.argument and step.action != "Switch Tab"]
    judge = Environment({}, OUT_DIR, site)
    for check in possible_checks(untouched, finished, answer, typed):
        idle = replay_once([], "", judge, check)
        if idle.success:
            continue
        demonstration = replay_once(steps, answer, judge, check)
        if demonstration.success:
            keep(Path(cfg.record), {**task, "eval": check}, demonstration, chat)
            return
    remedy = "close the window on a page that shows what you did"
    if not cfg.serve:
        remedy = "does the site start afresh for each episode (--serve)?"
    raise ValueError("nothing was recorded: no check passes after your steps and fails when nothing is done. Checks "
                     f"are made from the lines and fields of {address}; {remedy}.")


def require_complete(trajectory: Trajectory, policy: Replay, cfg: Config):
    """Raises ValueError if a replay did not get to its end."""
    if trajectory.status != "ok":
        raise ValueError(f"nothing was recorded: the environment failed ({trajectory.broken_by}).")
    context_full = trajectory.answer is None  # before the replay could exit
    if context_full or (policy.lost and trajectory.turns[-1].page_cut):
        raise ValueError(f"nothing was recorded: these pages do not fit into --max-context "
                         f"{cfg.max_context}; give more, here and to bc.py.")
    if policy.lost:
        raise ValueError(f"nothing was recorded: in the replay there was nothing to "
                         f"“{policy.lost.thought()}”; does the site start afresh (--serve)?")


def ask(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        return ""


def read_tasks(file: Path) -> tuple[Path, list[dict]]:
    """(the task file beside a file of demonstrations, its tasks). Raises ValueError."""
    if file.is_dir():
        raise ValueError(f"--record {file} is a folder; name a file in it.")
    tasks_file = file.with_suffix(".tasks.json")
    if not tasks_file.exists():
        return tasks_file, []
    rows = webarena.read_rows(str(tasks_file))
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("task_id"), (int, str)):
            raise ValueError(f"{tasks_file} holds {row!r:.60}, which is no task with a task_id; repair it, "
                             "or give another --record.")
    return tasks_file, rows


def keep(file: Path, task: dict, demonstration: Trajectory, chat: Chat):
    """Appends the demonstration to `file` and the task to the task file beside it."""
    tasks_file, tasks = read_tasks(file)
    taken = {str(known["task_id"]) for known in tasks}
    number = len(tasks)
    while str(number) in taken:  # an earlier recording was dropped
        number += 1
    task = {**task, "task_id": number}
    demonstration.task = task
    with run.writing(tasks_file):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = tasks_file.with_suffix(".tmp")
        text = json.dumps([*tasks, task], indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(to_record(demonstration, chat, split="train")) + "\n")
        temporary.replace(tasks_file)
    print(f"{file}: {len(demonstration.turns)} turns, replayed. {tasks_file}: task {task['task_id']}, with "
          f"the check {json.dumps(task['eval'], ensure_ascii=False)}")


# -------------------------------------------------------------------------------------- the script --


def main(cfg: Config):
    if cfg.record and cfg.by_hand:
        raise ValueError("--record and --by-hand are two ways to play; give one.")
    task = task_of(cfg)
    if cfg.record:
        record(cfg, task)
    elif cfg.by_hand:
        play_by_hand(cfg, task)
    else:
        play_once(cfg, task)


def command_line():
    run.command_line(main, Config, __doc__, start=checkpoint_of, positional=("url", "task"))


if __name__ == "__main__":
    command_line()
