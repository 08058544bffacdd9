"""Actions and their grammar, episodes on real pages, and the engine against the plain forward pass."""
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import (PAGE, ComputedStep, Env, answer, chromium, pad, redirect, scripted, task_at,
                      tiny_model)

import mgrpo
from compress import Trajectory, Turn, context, trajectory_rows
from model import KVCache, token_logprobs
from rollout import (ACTIONS, Call, Engine, Request, Settings, actions_help, episode, parse, play, progress,
                     rollout, task_key)
from worlds.browser import ActionError, Browser, EnvError

SETTINGS = Settings(max_turns=4, max_new_tokens=12, max_context=600, concurrency=4, timeout=5)

# ------------------------------------------------------------------------------------------ grammar

MARKDOWN = "Intro\n\n# Setup\n```\nmake\n```\n# end"
CALLS = [
    ('do(action="Click", element="12")', Call("Click", None, "12")),
    ("<think>hm</think><answer># Element: red lamp <12>\ndo(action='Click', element='12')</answer>",
     Call("Click", None, "12")),
    ('# Note: $24\n```python\ndo(action="Type", argument="a, \\"b\\" (c)", element="3")\n```',
     Call("Type", 'a, "b" (c)', "3")),
    ('do(action="Type", argument="two\nlines", element="3")', Call("Type", "two\nlines", "3")),
    (f'do(action="Type", argument="{MARKDOWN}", element="3")\n```\n# Note: done\n',
     Call("Type", MARKDOWN, "3")),
    ('do("Click", element=7)', Call("Click", None, "7")),
    ('do(action="Select Dropdown Option", argument="blue", element="[4]")',
     Call("Select Dropdown Option", "blue", "4")),
    ('do(action="Click", element="<12>")', Call("Click", None, "12")),
    ("go_backward()", Call("Go Backward")), ("go_forward()", Call("Go Forward")),
    ('do(action="Go Backward")', Call("Go Backward")), ('do(action="Scroll Down")', Call("Scroll Down")),
    ('do(action="Wait")', Call("Wait")), ('exit(message="$24")', Call("exit", "$24")),
    ("exit()", Call("exit", "")), ('exit("N/A")', Call("exit", "N/A")),
    ('do(action="exit", message="$24")', Call("exit", "$24")), ('do("exit", "N/A")', Call("exit", "N/A")),
    ("exit(message=-3.50)", Call("exit", "-3.50")), ('exit(answer="12")', Call("exit", "12")),
    ('do(\n  action="Click",  # the lamp\n  element="3"\n)', Call("Click", None, "3")),
    ('do(action="Type", argument="a\u2028b", element="3")', Call("Type", "a\u2028b", "3")),
    ('I will search.\ndo(action="Search", argument="do(x)", element="1")', Call("Search", "do(x)", "1")),
]


@pytest.mark.parametrize("text, call", CALLS)
def test_the_grammar_of_the_paper_is_understood(text, call):
    assert parse(text) == call
    assert parse(str(call)) == call  # the canonical form is in the grammar


@pytest.mark.parametrize("text, says", [
    ("", "no action"), ("click the lamp", "no action"),
    ('do(action="Click")', "needs the id"), ('do(action="Click", element="a7")', "needs the id"),
    ('do(action="Click", element="<>")', "needs the id"),
    ('do(action="Click", element="²")', "needs the id"),
    ('do(action="Type", element="3")', "needs an argument"),
    ('do(action="Fly", element="3")', "unknown action"), ('do(action="Click", element="3"', "cannot read"),
    ('do(action="Click", element="1")\nexit(message="a")', "cannot read"),
    ('do(action=__import__("os").getcwd(), element="1")', "cannot read"),
    ("do(" * 3000, "cannot read"), ("do(action=1)[0]", "cannot read"), ("<answer>do(action=", "was cut"),
    ('exit(message={{"price": 5}})', "cannot read"),
    ('do(action="Click", element={1: [2]}[0])', "cannot read"),
])
def test_what_is_not_an_action_is_explained_to_the_agent(text, says):
    with pytest.raises(ActionError, match=says):
        parse(text)


def test_prompt_and_parser_share_one_table():
    for line in actions_help().splitlines():
        call = parse(line[2:].split(": ")[0])
        assert call.name in ACTIONS
    assert len(actions_help().splitlines()) == len(ACTIONS)


def test_a_response_as_long_as_the_context_is_refused():
    with pytest.raises(ValueError, match="--max-new-tokens 2048 leaves no room"):
        Settings(max_new_tokens=2048, max_context=1536)


@pytest.mark.parametrize("n_tasks", [24, pytest.param(150, marks=pytest.mark.slow)])
def test_a_submitted_form_is_seen_before_the_next_observation(site, chat, run, n_tasks):
    """Browsers submit a form one task after the click. Looking too early once cost one episode in 150."""
    form = '<form method=post action="/sent"><input name=q><button>send</button></form>'
    base = site({"/": form, "/sent": "sent"})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]
    act = scripted(chat, ['do(action="Click", element="1")', "exit()"])
    settings = Settings(concurrency=12, max_turns=2, max_new_tokens=9, max_context=600)
    played = run(play(act, chat, tasks, Env(), settings))
    assert [tau.turns[1].observation for tau in played] == ["sent"] * n_tasks


# ----------------------------------------------------------------------------------------- episodes

@pytest.fixture
def run_episode(run, chat):
    """Plays one scripted episode."""
    def run_episode(url, texts, env=Env(), settings=SETTINGS):
        async def go():
            async with Browser(settings) as browser:
                act = scripted(chat, texts)
                return await episode(browser, chat, task_at(url), env, act, member=0, slot=0)
        return run(go())
    return run_episode


def test_an_error_is_read_in_the_next_observation(site, run_episode):
    texts = ['do(action="Click", element="99")', "nonsense", 'exit(message="red")']
    tau = run_episode(site({"/": PAGE}), texts)
    assert (tau.answer, tau.success, tau.status, len(tau.turns)) == ("red", 1.0, "ok", 3)
    assert tau.reward == tau.success
    assert tau.turns[1].observation.startswith("error: there is no element 99")
    assert tau.turns[2].observation.startswith("error: no action")
    assert not tau.turns[0].observation.startswith("error")


def test_the_tasks_side_logs_in_watches_before_each_action_and_judges_once(site, run_episode):
    told = []

    class Telling(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            told.append("enter")
            yield task | {"storage_state": {"cookies": [{"name": "who", "value": "ann", "url": task["start_url"]}]}}
            told.append("leave")

        async def watch(self, session, trajectory):
            told.append((session.page.url.rpartition("/")[2], trajectory.turns[-1].response))

        async def score(self, task, answer, page, checks):
            told.append(answer)
            checks.append(["seen", True, ""])
            return 1.0

    def greet(request):
        answer(request, b"<a href='/two'>" + request.headers["Cookie"].encode() + b"</a>")

    click = 'do(action="Click", element="0")'
    tau = run_episode(site({"/": greet, "/two": "two"}), [click, "exit('bye')"], Telling())
    assert tau.turns[0].observation == "<a>who=ann <0></a>"
    assert told == ["enter", ("", click), ("two", "exit('bye')"), "bye", "leave"]
    assert tau.success == 1.0 and tau.checks == [["seen", True, ""]]


def test_the_turn_limit_leaves_no_answer(site, run_episode):
    settings = Settings(max_turns=2, max_context=900, max_new_tokens=20)
    tau = run_episode(site({"/": PAGE}), ['do(action="Scroll Down")'], settings=settings)
    assert tau.answer is None and len(tau.turns) == 2


def test_a_broken_world_is_no_failure_of_the_agent(site, run_episode):
    assert run_episode("http://127.0.0.1:9/", ["exit()"]).status == "env_error"

    def drop(handler):
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
    base = site({"/": '<a href="/gone">x</a>', "/gone": drop})
    tau = run_episode(base, ['do(action="Click", element="0")', "exit()"])
    assert tau.status == "env_error" and tau.success == tau.reward == 0 and tau.checks

    assert "ERR_TOO_MANY_REDIRECTS" in run_episode(site({"/": redirect("/")}), ["exit()"]).checks[0][2]

    async def never_judges(task, answer, page, checks):
        await page.evaluate("for (;;);")
    tau = run_episode(site({"/": PAGE}), ["exit()"], Env(never_judges), replace(SETTINGS, timeout=0.4))
    assert tau.status == "env_error" and tau.checks[0][2] == "judging the episode took more than 4 s"

    async def cannot_judge(task, answer, page, checks):
        raise EnvError("the judged site is down")
    assert run_episode(site({"/": PAGE}), ["exit()"], Env(cannot_judge)).status == "env_error"


def test_a_history_that_fills_the_context_ends_the_episode(site, chat, run_episode):
    settings = Settings(max_turns=50, max_context=400, max_new_tokens=60)
    text = "# Note: " + "word " * 12 + '\ndo(action="Scroll Down")'
    tau = run_episode(site({"/": PAGE}), [text], settings=settings)
    assert tau.status == "ok" and 1 < len(tau.turns) < 50
    assert all(len(context(chat, tau, t)) <= 400 - 60 for t in range(len(tau.turns)))


def test_the_next_task_is_prepared_before_each_verdict_and_leftovers_are_ended(site, chat, run):
    """A worker plays what it has drawn early, so the order stays, also where a verdict is asked for twice."""
    told = []

    class Telling(Env):
        @contextlib.asynccontextmanager
        async def enter(self, browser, task):
            told.append(("enter", task["task_id"]))
            yield task

        def prepare(self, task):
            told.append(("prepare", task["task_id"]))

        async def end_prepared(self):
            told.append("end")

        async def score(self, task, answer, page, checks):
            told.append(("score", task["task_id"]))
            if task["task_id"] == 0 and told.count(("score", 0)) == 1:
                raise EnvError("no verdict")
            if task["task_id"] == 2:
                raise RuntimeError("a bug")
            return 1.0

    url = site({"/": "one"})
    tasks = [task_at(url) | {"task_id": number} for number in range(4)]
    settings = replace(SETTINGS, concurrency=1)
    with pytest.raises(RuntimeError, match="a bug"):
        run(play(scripted(chat, ["exit('bye')"]), chat, tasks, Telling(), settings))
    assert told == [("enter", 0), ("prepare", 1), ("score", 0), ("enter", 0), ("score", 0), ("enter", 1), ("prepare", 2),
                    ("score", 1), ("enter", 2), ("prepare", 3), ("score", 2), "end"]


def test_a_progress_line_says_how_far_how_fast_and_what_broke():
    turn = Turn("", "", [], [5, 6, 7], [], "")
    done = [Trajectory({}, turns=[turn, turn], success=1.0),
            Trajectory({}, turns=[turn], fault="the page crashed"),
            Trajectory({}, status="env_error", fault="the page crashed",
                       checks=[["environment", False, "refused at http://x"]])]
    assert progress(done, 5, 2.0) == (
        "3/5 episodes (60%), success 50%, 1.5 turns/s, 1 s left, env errors 1; "
        "2 x the page crashed; 1 x refused")
    assert "(99%)" in progress(done[:1] * 999, 1000, 2.0)  # a line that says (100%) is the last one


# ------------------------------------------------------------------------------------------- engine

@pytest.mark.parametrize("alike", [False, True])  # whether slots copy the beginnings of each other's contexts
@pytest.mark.parametrize("graphed_step", [None, ComputedStep])
def test_batched_decoding_with_kept_trunks_equals_plain_generation(chat, graphed_step, alike):
    """Many episodes join and leave one cache: the same ids and log-probs as one row at a time."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())

    async def talk(engine, slot):
        rng, ids, out = random.Random(slot), [3 if alike else slot + 3] * (4 + slot), []
        for turn in range(4):
            response, logps, ended = await engine.respond(ids, slot, rng)
            out.append((list(ids), response, logps))
            ids = ids[:-2] + response + [9, 9, turn, slot]  # rolls back two positions, as a page does
            await asyncio.sleep(0.001 * slot)
        return out

    async def run():
        engine = Engine(model, chat.end_id, slots=5, length=200, max_new_tokens=10)
        engine.graphed = graphed_step and graphed_step(model, engine.cache)
        server = asyncio.ensure_future(engine.serve())
        try:
            return await asyncio.gather(*(talk(engine, slot) for slot in range(5)))
        finally:
            server.cancel()

    with torch.no_grad():
        for talked in asyncio.run(run()):
            for ids, response, logps in talked:
                logits = model(torch.tensor([ids + response]))[0].log_softmax(-1)
                expected = [float(logits[len(ids) - 1 + k, token]) for k, token in enumerate(response)]
                assert logps == pytest.approx(expected, abs=1e-4)


def test_a_group_reads_its_first_page_once(chat):
    """The others copy keys and values, from a slot that decodes meanwhile, and compute what they do not share."""
    model, computed = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), []
    model.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape))
    system, page = list(range(3, 23)), list(range(50, 80))
    contexts = [system + page, system + page, system + page, system + page[::-1], system]

    async def run():
        engine = Engine(model, chat.end_id, slots=5, length=80, max_new_tokens=10)
        server = asyncio.ensure_future(engine.serve())
        asked = (engine.respond(ids, slot, random.Random(slot)) for slot, ids in enumerate(contexts))
        answers = await asyncio.gather(*asked)
        answers.append(await engine.respond(contexts[0], 4, random.Random(9)))  # the donors have gone on
        server.cancel()
        return answers

    answers = asyncio.run(run())
    assert [T for B, T in computed if T > 1] == [len(system + page) - 1, len(page) - 1]
    for ids, (response, logps, _) in zip([*contexts, contexts[0]], answers, strict=True):
        logits = model(torch.tensor([ids + response]))[0].log_softmax(-1)
        expected = [float(logits[len(ids) - 1 + k, token]) for k, token in enumerate(response)]
        assert logps == pytest.approx(expected, abs=1e-4)


def test_the_engine_does_not_round_a_random_number_up_to_the_last_token(chat, monkeypatch):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    model.logits = lambda x: torch.full((len(x), 400), -1e4).index_fill(1, torch.tensor([7]), 0.0)
    monkeypatch.setattr(random.Random, "random", lambda self: 1 - 2**-53)
    engine = Engine(model, chat.end_id, slots=4, length=600, max_new_tokens=12)
    request = Request(0, [1, 2], random.Random())
    engine.running.append(request)
    engine.prefill(request)
    engine.decode()
    assert request.out == [7]


def test_an_engine_that_fails_fails_the_rollout_instead_of_hanging(site, chat, run):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    model.logits = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(rollout(model, chat, [task_at(site({"/": PAGE}))], Env(), SETTINGS))


@pytest.mark.parametrize("n_tasks", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_rollout_logprobs_equal_training_logprobs(site, chat, run, n_tasks):
    """The claim of the project, on real pages: every action token, float32, 1e-4."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    base = site({"/": PAGE, "/two": "two"})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]
    trajectories = run(rollout(model, chat, tasks, Env(), SETTINGS, group=2, seed=1, temperature=0.8))
    assert len(trajectories) == 2 * n_tasks
    assert all(tau.status == "ok" and len(tau.turns) == 4 for tau in trajectories)
    samples = [row for tau in trajectories for row in trajectory_rows(chat, tau)]
    scored = [token_logprobs(model, *pad([row]), temperature=0.8)[0].detach() for row in samples]
    sampled = torch.tensor([x for row in samples for x in row.logps])
    assert len(sampled) > 60 * n_tasks
    torch.testing.assert_close(torch.cat(scored), sampled, atol=1e-4, rtol=0)


@pytest.mark.parametrize("n_tasks", [6, pytest.param(32, marks=pytest.mark.slow)])
def test_a_rollout_does_not_depend_on_how_many_run_at_once(site, chat, run, n_tasks):
    """At temperature 1, one browser context or many: the same ids; log-probs round with the batch."""
    model, base = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), site({"/": PAGE})
    tasks = [task_at(base, task_id=i) for i in range(n_tasks)]
    settings = Settings(max_turns=2, max_new_tokens=12, max_context=600)
    runs = [run(rollout(model, chat, tasks, Env(), replace(settings, concurrency=n), group=2, seed=5))
            for n in (1, n_tasks // 2)]
    alone, together = ([turn for tau in played for turn in tau.turns] for played in runs)
    assert [turn.action_ids for turn in alone] == [turn.action_ids for turn in together]
    assert len(alone) == 4 * n_tasks
    alone, together = (sum((turn.logps for turn in turns), []) for turns in (alone, together))
    assert alone == pytest.approx(together, abs=1e-5)


def test_nothing_of_a_rollout_holds_its_cache(site, chat, monkeypatch):
    """A cache takes gigabytes. It goes with the rollout, even if something still refers to the engine.

    It has a slot for each episode at once: for the one episode here, not for --concurrency.
    """
    caches, slots = [], []

    class Watched(KVCache):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            caches.append(weakref.ref(self))
            slots.append(self.slots)

    monkeypatch.setattr("rollout.KVCache", Watched)
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    tasks = [task_at(site({"/": PAGE}))]
    gc.collect()
    gc.disable()
    try:
        asyncio.run(rollout(model, chat, tasks, Env(), SETTINGS))
        assert len(caches) == 1 and caches[0]() is None and slots == [1]
    finally:
        gc.enable()


def test_all_forward_passes_of_an_engine_run_on_one_thread(chat):
    """Each thread would have its own workspaces on a GPU."""
    model, threads = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), set()
    model.register_forward_pre_hook(lambda *_: threads.add(threading.get_ident()))

    async def respond():
        engine = Engine(model, chat.end_id, slots=6, length=64, max_new_tokens=8)
        server = asyncio.ensure_future(engine.serve())
        await asyncio.gather(*(engine.respond([3 + i] * 20, i, random.Random(i)) for i in range(6)))
        server.cancel()
        await asyncio.wait([server])

    asyncio.run(respond())
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_a_forward_pass_ends_before_the_rollout_does(chat, monkeypatch):
    """Afterwards the weights are sharded again: a pass that still runs would read freed memory."""
    began, let_end, events = threading.Event(), threading.Event(), []

    @contextlib.contextmanager
    def unsharded(model):
        try:
            yield model
        finally:
            events.append("resharded")

    def prefill(engine, request):
        began.set()
        let_end.wait(20)
        events.append("computed")

    async def play(act, *_, **more):
        trajectory = Trajectory({"task_id": 0, "intent": "x"}, turns=[Turn("", "", [5], [], [], "")])
        waiting = asyncio.ensure_future(act(trajectory, 0))
        await asyncio.to_thread(began.wait)
        threading.Timer(0.2, let_end.set).start()
        waiting.cancel()
        raise ZeroDivisionError

    for name, replacement in (("unsharded", unsharded), ("Engine.prefill", prefill), ("play", play)):
        monkeypatch.setattr(f"rollout.{name}", replacement)
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(rollout(model, chat, [], Env(), SETTINGS))
    assert events == ["computed", "resharded"]


def test_siblings_live_in_worlds_of_their_own(site, chat, run):
    seen = []

    def page(handler):
        seen.append(handler.headers["X-World"])
        answer(handler)
    tasks, act = [task_at(site({"/": page}), world=7)], scripted(chat, ["exit()"])
    run(play(act, chat, tasks, Env(), SETTINGS, group=3))
    worlds = {w for w in seen if w}
    assert len(worlds) == 3 and all(w.startswith("7-") for w in worlds)


# ------------------------------------------------------------------------- attacks, and failures of the world


def test_a_page_that_leaves_the_sites_at_once_does_not_end_the_run(site, chat):
    outside = site({"/": "<p>pwned</p>"})
    inside = site({"/": "<a href='/trap'>on</a>", "/trap": f"<script>location = '{outside}'</script>",
                   "/home": f"<script>location.replace('{outside}')</script>"})
    act = scripted(chat, ['do(action="Click", element="0")', "exit()"])
    first, second = (asyncio.run(play(act, chat, [task_at(inside + path)], Env(), SETTINGS))[0]
                     for path in ("/", "/home"))
    assert first.status == "ok" and "is not one of the task's sites" in first.turns[1].observation
    assert all("pwned" not in turn.observation for tau in (first, second) for turn in tau.turns)


# A name is cut after 300 UTF-16 units: here in the middle of the emoji.
HALVES = ("<a href='/ok'>" + "x" * 299 + "\U0001f600</a><a href='/ok'>half</a>"
          "<script>document.links[1].textContent = 'half \\ud83d!'; alert('\\udc00')</script>")
ODD = {  # pages whose text is no proper text -> a part of what the agent reads
    "half a surrogate pair": (HALVES, "half ?! <1></a>"),
    "a result that is no text": ("<script>Array.prototype.join = () => ({length: 1})</script>",
                                 "{'length': 1}"),
    "names that are elements": ("<form name=f><input name=title value=a><input name=disabled>"
                                "<input name=name><img name=title></form>", "<input>disabled <1></input>"),
}


BENT = {  # what a page does to the language of our scripts -> the agent's or the world's error, "" for none
    "Object.keys = () => []": "error: element 0 cannot be found",
    "Array.isArray = () => true": "error: element 0 cannot be found",
    "Array.prototype.join = () => new Date(8.64e15)": "garbles what is read of it",
    "setTimeout = Promise = undefined": "",
    "window[Symbol.for('work')] = 1": "",
}


@pytest.mark.parametrize("script", BENT)
def test_a_page_that_bends_our_scripts_ends_no_run(site, script, run_episode):
    base = site({"/": f"<button>x</button><script>{script}</script>"})
    tau = run_episode(f"{base}/", ['do(action="Click", element="0")', "exit()"])
    if "garbles" in BENT[script]:
        assert tau.status == "env_error" and BENT[script] in tau.checks[0][2]
    else:
        assert tau.status == "ok"
        assert tau.turns[0].observation == "<button>x <0></button>"
        assert tau.turns[1].observation == f"{BENT[script]}\n<button>x <0></button>".strip()


@pytest.mark.parametrize("name", ODD)
def test_a_page_may_give_anything_and_the_episode_can_be_written_as_json(site, chat, name, run_episode):
    page, seen = ODD[name]
    texts = ['do(action="Switch Tab", argument="²")', "exit()"]
    tau = run_episode(site({"/": page, "/ok": "ok"}) + "/", texts)
    assert tau.status == "ok" and seen in tau.turns[0].observation, tau.checks or tau.turns[0].observation
    assert "there is no tab" in tau.turns[1].observation
    line = tau.to_json(chat)
    assert json.loads(json.dumps(line, ensure_ascii=False).encode()) == line


def test_a_blocked_link_in_the_last_turn_is_judged_where_it_was_pressed(site, chat):
    base, judged = site({"/": f"<a href='{site({'/': 'x'})}'>out</a>"}), []

    async def look(task, answer, page, checks):
        judged.append(page.url)
        return 0.0
    act = scripted(chat, ['do(action="Click", element="0")'])
    tau, = asyncio.run(play(act, chat, [task_at(f"{base}/")], Env(look), replace(SETTINGS, max_turns=1)))
    assert tau.status == "ok" and judged == [f"{base}/"]


@pytest.mark.parametrize("kind", ["browser", "renderer"])
def test_episodes_that_a_killed_chromium_took_along_are_played_again(site, chat, kind):
    url, others, killed = site({"/": "<a href='/'>again</a>"}), chromium(kind), []

    async def act(trajectory, slot):
        if trajectory.task["task_id"] == 1 and not killed:  # in the midst of an episode
            killed.extend(set(chromium(kind)) - set(others))
            for process in killed:
                os.kill(process, signal.SIGKILL)
        text = 'do(action="Click", element="0")' if len(trajectory.turns) < 3 else "exit()"
        return [*chat.encode(text), chat.end_id], [], True

    settings = Settings(concurrency=2, max_turns=5, max_new_tokens=40, max_context=800, timeout=5)
    tasks = [task_at(url, task_id=i) for i in range(6)]
    played = asyncio.run(play(act, chat, tasks, Env(), settings))
    assert killed and [(tau.status, tau.success) for tau in played] == [("ok", 1.0)] * 6
    assert played[1].fault and not played[5].fault


def chaotic(fates: Counter):
    """A page of a site that does not answer 5% of its requests, and answers 500 to another 5%."""
    rng = random.Random(0)

    def page(request):
        luck = rng.random()
        fate = "hung" if luck < 0.05 else "500" if luck < 0.1 else "fine"
        fates[fate] += 1
        if fate == "hung":
            time.sleep(5)
        with contextlib.suppress(OSError):  # the browser may have given up
            answer(request, *(b"out of order", 500) if fate == "500" else (b"<a href='/shaky'>on</a>",))
    return page


@pytest.mark.parametrize("n_tasks, G", [(5, 6), pytest.param(20, 10, marks=pytest.mark.slow)])
def test_a_step_in_chaos_completes_and_counts_right(site, checkpoint, tmp_path, monkeypatch, capsys,
                                                    n_tasks, G):
    """One step of mgrpo.py while Chromium is killed three times and the site is shaky.

    An episode fails if its first page does not come, or comes with a 500, or if it loses its Chromium. It is
    then played once more; a second failure is an environment error. Later pages may hang or say 500:
    the agent reads that.
    """
    fates, others = Counter(), chromium("browser")
    kills = [(1, 1), (1, 1), (n_tasks - 1, 0)]  # the first of these twice: there is no third attempt
    base = site({"/shaky": chaotic(fates), "/calm": "<a href='/shaky'>on</a>",
                 "/down": lambda request: answer(request, b"out of order", 500)})
    start = {0: "down", 1: "calm", n_tasks - 1: "calm"}
    tasks = [task_at(f"{base}/{start.get(i, 'shaky')}", task_id=i, require_login=False, eval={
        "eval_types": ["string_match"], "reference_answers": {"exact_match": "yes"}}) for i in range(n_tasks)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))

    async def scripted_rollout(model, chat, tasks, env, settings, *, group, seed, temperature, tick):
        async def act(tau, slot):
            if (tau.task["task_id"], tau.member) in kills:
                kills.remove((tau.task["task_id"], tau.member))
                os.kill(*set(chromium("browser")) - set(others), signal.SIGKILL)
            answer = "yes" if tau.member % 2 else "no"
            text = 'do(action="Click", element="0")' if len(tau.turns) < 3 else f'exit(message="{answer}")'
            ids = [*chat.encode(text), chat.end_id]
            return ids, [-1.0] * len(ids), True
        return await play(act, chat, tasks, env, settings, group=group, tick=tick)

    monkeypatch.setattr(mgrpo, "rollout", scripted_rollout)
    files = dict(model=str(checkpoint), tasks=str(tmp_path / "tasks.json"), out=str(tmp_path / "run"))
    mgrpo.main(mgrpo.Config(**files, steps=1, batch=n_tasks, G=G, concurrency=G // 2, timeout=2.5))
    played = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    ok = [tau for tau in played if tau["status"] == "ok"]
    assert kills == [] and chromium("browser") == others and fates["hung"] and fates["500"]
    everyone = [(i, m) for i in range(n_tasks) for m in range(G)]
    assert sorted((tau["task_id"], tau["member"]) for tau in played) == everyone
    assert all("out of order" not in tau["turns"][0]["observation"] for tau in ok)
    assert (1, 1) not in [(tau["task_id"], tau["member"]) for tau in ok] and all(tau["task_id"] for tau in ok)
    assert metrics["env_errors"] == len(played) - len(ok)
    assert metrics["env_retries"] == sum(bool(tau["fault"]) for tau in played)
    assert all(tau["fault"] for tau in played if tau["status"] != "ok")
    assert f"env errors {len(played) - len(ok)}; " in capsys.readouterr().out
    assert metrics["success_rate"] == pytest.approx(sum(tau["success"] for tau in ok) / len(ok))
    groups = [torch.tensor([tau["reward"] for tau in ok if tau["task_id"] == i]) for i in range(n_tasks)]
    assert metrics["groups_kept"] == sum(0 < r.mean() < 1 for r in groups)
    assert 0 < groups[1].mean() < 1 and len(groups[1]) < G  # one that trains although it lost members
    for tau in played:  # statistics over what is left of a group; nothing for what has left it
        r = groups[tau["task_id"]]
        valid = tau["status"] == "ok" and 0 < r.mean() < 1
        expected = float((tau["reward"] - r.mean()) / r.std()) if valid else 0
        assert tau["advantage"] == pytest.approx(expected, abs=1e-5)


def test_every_forward_of_a_rollout_runs_unsharded(site, chat, monkeypatch, run):
    """Ranks decode different numbers of tokens. Sharded, each forward would wait for another rank's."""
    model, inside, seen = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), [], []

    @contextlib.contextmanager
    def spy(of):
        inside.append(of)
        yield of
        inside.remove(of)

    monkeypatch.setattr("rollout.unsharded", spy)
    model.register_forward_hook(lambda *_: seen.append(inside == [model]))
    tasks = [task_at(f"{site({'/': '<a href=/>on</a>'})}/")]
    settings = Settings(max_turns=2, max_new_tokens=4, max_context=600, concurrency=1)
    run(rollout(model, chat, tasks, Env(), settings))
    assert len(seen) > 4 and all(seen) and not inside


def test_one_at_a_time_two_runs_are_equal_bit_for_bit(site, chat, run):
    """The server's delays differ from run to run, so with several episodes at once the batches would."""
    def late(request):
        time.sleep(random.random() * 0.05)
        answer(request, b"<a href='/'>on</a> <a href='/b'>off</a>")

    base, model = site({"/": late, "/b": late}), tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    settings = Settings(max_turns=3, max_new_tokens=12, max_context=600, concurrency=1)
    tasks = [task_at(f"{base}/") | {"task_id": i} for i in range(5)]
    runs = [run(rollout(model, chat, tasks, Env(), settings, group=2, seed=3)) for _ in range(2)]
    first, second = ([[(turn.action_ids, turn.logps) for turn in tau.turns] for tau in run] for run in runs)
    assert first == second and len(first) == 10


def test_equal_ids_of_two_sources_have_random_numbers_of_their_own(site, chat, run):
    """A task file may number its tasks as the sandbox does. Both used to draw the same stream, so on equal
    pages they played the same episode twice."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    tasks = [task_at(site({"/": PAGE})), task_at(site({"/": PAGE}), source=1)]
    assert [task_key(task) for task in tasks] == ["0", "1:0"]
    settings = Settings(max_turns=1, max_new_tokens=12, max_context=600, concurrency=1)
    first, second = run(rollout(model, chat, tasks, Env(), settings, seed=3))
    assert first.turns[0].observation == second.turns[0].observation
    assert first.turns[0].action_ids != second.turns[0].action_ids
    again, = run(rollout(model, chat, tasks[:1], Env(), settings, seed=3))  # alone, an id draws what it always drew
    assert again.turns[0].action_ids == first.turns[0].action_ids
