"""forks/checklist.py: rewards and credit against slow loops; what a look sees, and that it changes nothing."""
import copy
import itertools
import math
import statistics

import pytest
import torch
from conftest import ROOT, Env, make_task, scripted, task_at
from test_forks import METHODS, parse, play, pointing  # noqa: F401 (fixtures)
from test_mgrpo import method_of, trajectory
from test_scripts import ENV, METRICS, read, script

import evaluate
import mgrpo
import rollout
from compress import trajectory_rows
from evaluate import Check, Environment
from forks import checklist
from model import load
from worlds import sandbox
from worlds.webarena import site_urls

METHODS[checklist] = checklist.Checklist


def checklist_of(chat=None, **changes):
    cfg = checklist.Config(**changes)
    return method_of(chat, None, cfg, Method=checklist.Checklist)


def task_with(n, entries=None):
    """A task with n checks of the page left open."""
    words = [f"word{c}" for c in range(n)]
    page = {
        "url": "last",
        "locator": "",
        "required_contents": {"must_include": words},
    }
    spec = {"eval_types": ["program_html"], "program_html": [page]}
    if entries is not None:
        spec["checklist"] = entries
    return make_task(**spec)


def episode(chat, task, n_turns, verdicts, seen=None, seed=0, member=0, status="ok"):
    """An episode after its end: what the judge found, and what the looks saw before."""
    success = float(all(verdicts))
    tau = trajectory(chat, success, [3] * n_turns, seed=seed, member=member, status=status)
    tau.task = task
    tau.checks = [Check(f"check {c}", passed, "") for c, passed in enumerate(verdicts)]
    tau.seen = seen or {}
    return tau


# ------------------------------------------------------------------------------------- which checks are met


def obviously_met(items, history):
    """{check: the turn that met it}, by going through the looks one by one. history: what each look saw."""
    met = {}
    for turn, holds in history:
        while True:
            ready = []
            for c, item in enumerate(items):
                if holds[c] and c not in met and set(item.needs) <= set(met):
                    ready.append(c)
            if not ready:
                break
            met[ready[0]] = turn
    return met


def test_a_check_counts_once_what_it_needs_is_met():
    """Over all pairs of looks on four checks, two of which wait for others."""
    entries = [{}, {"needs": [3]}, {"needs": [0, 1]}, {}]
    items = checklist.checklist(task_with(4, entries))
    looks = list(itertools.product([False, True], repeat=4))

    for first, second in itertools.product(looks, repeat=2):
        met = checklist.meet(items, first, {}, turn=0)
        checklist.meet(items, second, met, turn=1)
        assert met == obviously_met(items, [(0, first), (1, second)])

    only_those_that_wait = [False, True, True, False]
    assert checklist.meet(items, only_those_that_wait, {}, turn=0) == {}


def test_a_page_left_open_counts_if_it_held_once_and_another_page_if_the_judge_finds_it(chat):
    """A field that was filled in but not sent looks right on the page, and the judge does not find it."""
    contents = {"must_include": ["a"]}
    task = make_task(
        eval_types=["string_match", "url_match", "program_html"],
        reference_answers=contents,
        reference_url="http://h/a",
        program_html=[
            {"url": "http://h/cart", "locator": "", "required_contents": contents},
            {"url": "last", "locator": "", "required_contents": contents},
        ],
    )
    answer, url, last, cart = range(4)  # the order of the judge's checks

    def met(verdicts, seen):
        return checklist.checks_met(episode(chat, task, 5, verdicts, seen))

    nothing = [False] * 4
    only_cart = [False, False, False, True]
    all_but_cart = [True, True, True, False]
    only_url = [False, True, False, False]
    assert met(nothing, {url: 1, last: 2, cart: 3}) == {url: 1, last: 2}
    assert met(only_cart, {cart: 3}) == {cart: 3}
    assert met(only_cart, {}) == {cart: None}  # the agent never looked: nobody knows
    assert met(all_but_cart, {}) == {answer: 4, url: 4, last: 4}  # by the last turn
    assert met(nothing, {url: -1, last: 0}) == {last: 0}  # what held at the start must hold at the end
    assert met(only_url, {url: -1}) == {url: -1}


def test_what_no_look_could_see_is_credited_to_no_turn(chat):
    """A page left open that the judge has to act on, or that came to hold after the look before an exit."""
    contents = {"must_include": ["a"]}
    page = {"url": "last", "locator": "", "required_contents": contents}
    task = make_task(
        eval_types=["url_match", "program_html"],
        reference_url="http://h/a",
        program_html=[
            page,
            page | {"prep_actions": ["x.click()"]},
            page | {"locator": "func:f(__page__)"},
        ],
    )
    tau = episode(chat, task, 3, [True] * 4)

    assert checklist.checks_met(tau) == {0: 2, 1: 2, 2: None, 3: None}  # the last action was no exit
    tau.answer = ""
    assert checklist.checks_met(tau) == {0: None, 1: None, 2: None, 3: None}
    tau.seen = {0: 0, 1: 1}
    assert checklist.checks_met(tau) == {0: 0, 1: 1, 2: None, 3: None}


def test_what_held_at_the_start_is_what_others_need_and_no_turn_earns_it(chat):
    task = task_with(2, [{}, {"needs": [0]}])
    tau = episode(chat, task, 4, [False, True], {0: -1, 1: 2})
    assert checklist.checks_met(tau) == {1: 2}

    idle = episode(chat, task_with(2), 1, [True, False], {0: -1})
    assert checklist_of(chat).reward(idle) == pytest.approx(1 / 3)
    assert checklist_of(chat, reward="f1").reward(idle) == 0  # else to exit at once would have P = 1


def test_without_a_required_check_an_episode_earns_nothing(chat):
    task = task_with(3, [{"required": True}, {}, {}])
    without = episode(chat, task, 3, [False, True, True], {1: 0})
    assert checklist.checks_met(without) == {}
    with_it = episode(chat, task, 3, [True, True, False], {1: 0})
    assert checklist.checks_met(with_it) == {0: 2, 1: 0}
    unseen = episode(chat, task, 3, [False, True, True])
    assert checklist_of(chat).reward(unseen) == 0


def test_a_required_check_that_held_at_the_start_and_was_broken_costs_the_reward(chat):
    task = make_task(
        eval_types=["url_match", "program_html"],
        reference_url="http://h/a",
        program_html=[{"url": "http://h/b", "locator": "", "required_contents": {"must_include": ["x"]}}],
        checklist=[{"required": True}, {}],
    )
    broken = episode(chat, task, 3, [False, True], {0: -1})
    assert checklist.checks_met(broken) == {}
    kept = episode(chat, task, 3, [True, True], {0: -1})
    assert checklist.checks_met(kept) == {0: -1, 1: None}


# ----------------------------------------------------------------------------------- rewards and advantages

WEIGHTS = [1.0, 3.0, 0.5]


def some_group(chat):
    """Five failures and a success of one task, with several histories, and one that the environment broke."""
    task = task_with(3, [{"weight": w} for w in WEIGHTS])
    histories = [  # turns, what the judge found, what the looks saw
        (4, [False, False, False], {}),
        (3, [True, False, False], {0: 1}),
        (5, [True, True, False], {0: 0, 1: 3}),
        (2, [False, False, True], {1: 0}),
        (6, [True, True, True], {0: 2, 1: 2}),
        (1, [False, False, False], {0: -1}),
    ]
    group = []
    for i, (n_turns, verdicts, seen) in enumerate(histories):
        tau = episode(chat, task, n_turns, verdicts, seen, seed=i, member=i)
        group.append(tau)
    broken = episode(chat, task, 2, [True] * 3, status="env_error")
    return [*group, broken]


# what the episodes of some_group met, and in which turn, by hand
BY_HAND = [
    {},
    {0: 1},
    {0: 0, 1: 3},
    {1: 0, 2: 1},
    {0: 2, 1: 2, 2: 5},
    {},
]


def obvious_reward(met, success, turns, weight, kind):
    total = weight
    got = weight * success
    for c, w in enumerate(WEIGHTS):
        total += w
        if c in met:
            got += w
    recall = got / total
    if kind == "checks" or recall == 0:
        return recall
    precision = min(len(met) / turns, 1)
    return 2 / (1 / precision + 1 / recall)  # the harmonic mean


def obvious_credits(met, turns, weight):
    """e: the share of all weight that each turn's checks have."""
    e = []
    for j in range(turns):
        earned = 0.0
        for c, w in enumerate(WEIGHTS):
            if met.get(c) == j:
                earned += w
        e.append(earned / (sum(WEIGHTS) + weight))
    return e


@pytest.mark.parametrize("kind, weight, k", [
    ("checks", 1.0, 1.0),
    ("checks", 0.0, 0.5),
    ("f1", 2.0, 0.0),
])
def test_rewards_and_advantages_are_those_of_the_docstring(chat, kind, weight, k):
    method = checklist_of(chat, reward=kind, success_weight=weight, turn_credit=k)
    *valid, broken = some_group(chat)

    expected = []
    for tau, met in zip(valid, BY_HAND):
        tau.reward = method.reward(tau)
        expected.append(obvious_reward(met, tau.success, len(tau.turns), weight, kind))
    assert [tau.reward for tau in valid] == pytest.approx(expected)

    kept = method.advantages([*valid, broken])
    assert kept == valid
    baseline = statistics.mean(expected)
    for tau, met, r in zip(kept, BY_HAND, expected):
        e = obvious_credits(met, len(tau.turns), weight)
        mean_e = statistics.mean(e)
        for j, row in enumerate(trajectory_rows(chat, tau)):
            A = r - baseline + k * (e[j] - mean_e)
            assert row.advantage == pytest.approx(A, abs=1e-12)
        assert sum(turn.advantage for turn in tau.turns) == pytest.approx(0, abs=1e-12)


def test_the_best_is_still_the_success_and_a_table_counts_nothing_else(chat):
    method = checklist_of(chat)
    group = some_group(chat)
    before = [tau.success for tau in group]

    rewards = [method.reward(tau) for tau in group[:-1]]
    assert max(rewards) == 1
    assert rewards[4] == 1
    second_best = sorted(rewards)[-2]
    assert second_best < 1
    passing = episode(chat, task_with(2), 3, [False, False], {0: 0, 1: 1})  # both held, never at the end
    assert method.reward(passing) == pytest.approx(2 / 3)

    method.advantages(group)
    assert [tau.success for tau in group] == before
    assert evaluate.rate(group)["success_rate"] == pytest.approx(1 / 6)


def test_f1_prefers_the_shorter_of_two_ways_to_the_same_checks(chat):
    method = checklist_of(chat, reward="f1")

    def reward(n_turns, verdicts):
        task = task_with(len(verdicts))
        return method.reward(episode(chat, task, n_turns, verdicts))

    short = reward(2, [True, False])
    long = reward(8, [True, False])
    assert short > long > 0
    at_once = reward(1, [True, True, True])
    assert at_once == 1  # three checks met by one action: a precision of 3 would be none


def test_a_group_that_fails_as_a_whole_teaches_who_got_further(chat):
    """mgrpo.py drops it; here the turn that met a check has the largest advantage."""
    task = task_with(2)
    lost = [False, False]
    group = []
    for i, seen in enumerate([{}, {0: 2}, {}]):
        group.append(episode(chat, task, 4, lost, seen, seed=i, member=i))
    even = []
    for i in range(3):
        even.append(episode(chat, task, 4, lost, {0: i}, seed=9 + i, member=i))
    won = []
    for i in range(3):
        won.append(episode(chat, task, 4, [i == 0] * 2, seed=19 + i, member=i))
    assert mgrpo.group_advantages(copy.deepcopy(group)) == []

    method = checklist_of(chat, G=3)
    episodes = [*group, *even, *won]
    for tau in episodes:
        tau.reward = method.reward(tau)
    rows, metrics = method.training_rows(episodes, 0)
    assert metrics == {"groups_kept": 2, "groups_revived": 1}
    assert {id(row.tau) for row in rows} == {id(tau) for tau in group + won}

    of_first = [row.advantage for row in rows if row.tau is group[0]]
    of_best = [row.advantage for row in rows if row.tau is group[1]]
    assert of_best.index(max(of_best)) == 2
    assert of_best[2] > of_best[0] > 0
    assert max(of_first) < 0


def test_equal_rewards_are_equal_whatever_checks_they_are_the_sum_of(chat):
    """1/12 + 4/12 and 5/12 differ in the last bit: the group trained on rounding."""
    task = task_with(4, [{"weight": 1}, {"weight": 1}, {"weight": 4}, {"weight": 5}])
    by_two = episode(chat, task, 3, [True, False, True, False], member=0)
    by_one = episode(chat, task, 3, [False, False, False, True], member=1)
    method = checklist_of(chat)
    for tau in (by_two, by_one):
        tau.reward = method.reward(tau)
    assert by_two.reward != by_one.reward
    assert method.advantages([by_two, by_one]) == []


@pytest.mark.parametrize("entries", [
    [{}],
    [{}, {}, {}],
    [{}, {"needs": [1]}],
    [{"needs": [1]}, {"needs": [0]}],
    [{}, {"needs": [7]}],
    [{}, {"weight": -1}],
    [{"weight": 0}, {"weight": 0}],
    [{}, {"weight": math.inf}],
    [{}, {"required": "false"}],
    [{}, {"points": 3}],
    [{}, {"weight": "2"}],
    [{}, {"needs": 0}],
    [{}, 3],
    None,
    "all",
])
def test_a_checklist_that_cannot_be_followed_is_one_sentence(entries):
    task = task_with(2)
    task["eval"]["checklist"] = entries
    says = "task 7: eval.checklist needs an entry for each of the judge's 2 checks"
    with pytest.raises(ValueError, match=says) as no:
        checklist.checklist(task)
    assert "\n" not in str(no.value)


def test_a_task_that_checks_nothing_is_one_sentence():
    """It was "min() iterable argument is empty"."""
    with pytest.raises(ValueError, match="task 7 checks nothing"):
        checklist.checklist(make_task(eval_types=[]))


def test_all_checklists_are_read_before_anything_is_played(chat, play, monkeypatch):  # noqa: F811
    """Not only those of the first step's tasks: a bad one ended the run at the step that drew it."""
    good = [task_with(2) | {"task_id": i} for i in range(9)]
    bad = task_with(2, [{}]) | {"task_id": 9}

    def load_tasks(*args, **kwargs):
        return [*good, bad]

    def task_batch(tasks, step, cfg):
        return good[:cfg.batch]

    monkeypatch.setattr(mgrpo.worlds, "load_tasks", load_tasks)
    monkeypatch.setattr(mgrpo.worlds, "check_files", lambda *specs: None)
    monkeypatch.setattr(mgrpo, "task_batch", task_batch)
    with pytest.raises(ValueError, match="task 9: eval.checklist needs an entry"):
        play(checklist, None, "x")  # no rollout


@pytest.mark.parametrize("changes, says", [
    ({"reward": "all"}, "--reward all: use checks or f1"),
    ({"success_weight": -1.0}, "--success-weight -1"),
])
def test_settings_that_weigh_nothing_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        checklist_of(**changes)


# ------------------------------------------------------------------------------------------------ the looks


def everything(base):
    """A task with all kinds of checks."""
    heading = {
        "url": f"{base}/two",
        "locator": "document.querySelector('h1').innerText",
        "required_contents": {"must_include": ["cart", "empty"]},
    }
    text = {
        "url": "last",
        "locator": "",
        "required_contents": {"must_include": ["lamp"], "must_exclude": ["sold"]},
    }
    prepared = {
        "url": "last",
        "locator": "document.title",
        "required_contents": {"exact_match": "two"},
        "prep_actions": ["document.title = 'two'"],
    }
    missing = {
        "url": f"{base}/two",
        "locator": "document.querySelector('#none').innerText",
        "required_contents": {"must_exclude": ["lamp"]},
    }
    answers = {
        "must_include": ["red", "blue"],
        "exact_match": "x",
        "one_of": ["a", "b"],
    }
    task = make_task(
        eval_types=["string_match", "url_match", "program_html"],
        reference_answers=answers,
        reference_url=f"{base}/two",
        program_html=[heading, text, prepared, missing],
    )
    return task | {"start_url": base}


def places_of(task):
    """Where each of the judge's checks looks."""
    places = []
    for part in checklist.parts(task):
        places += [part.place] * part.n_checks
    return places


PAGES = {
    "/": '<title>one</title><p>lamp</p><a href="/two">go</a><input aria-label=q>',
    "/two": "<title>page</title><h1>my cart</h1>",
}


def test_a_look_has_the_judges_order_and_verdict_on_what_the_page_shows(site, browse):
    base = site(PAGES)
    two = f"{base}/two"
    task = everything(base)
    places = places_of(task)

    async def look_at(session, url):
        await session.page.goto(url)
        holds = await checklist.look(task, session.page)
        assert await session.page.title() != "two"  # prep_actions did not run
        assert session.page.url.rstrip("/") == url
        return holds

    async def test(session):
        start = await look_at(session, base)
        end = await look_at(session, two)
        made = await evaluate.checks(task, None, session.page)
        assert len(made) == 11
        assert len(places) == 11
        assert len(start) == 11

        of_url = []
        for place, check in zip(places, made):
            if check.name.startswith("url_match"):
                of_url.append(place)
        assert of_url == ["url_match"]
        assert places == ["answer"] * 4 + ["url_match"] + ["last"] * 3 + [two] * 3
        assert start == [False] * 5 + [True, True, False] + [False] * 3
        assert end == [False] * 4 + [True] + [False, True, False] + [True, False, False]

        for place, seen, check in zip(places, end, made):  # the judge, who also runs prep_actions, on the same page
            if place != "answer" and "title" not in check.detail:
                assert seen == check.passed
    browse(test, base)


def test_looking_changes_nothing_that_the_agent_or_the_site_notices(site, chat, run):
    """Observations, tabs, the address, the tab's history and the requests of two episodes, one of them watched."""
    requests = []
    histories = []

    def counted(path):
        def page(handler):
            requests.append(handler.path)
            body = PAGES[path].encode()
            handler.send_response(200)
            handler.send_header("Content-Type", "text/html")
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body)
        return page

    class Curious(Env):
        async def watch(self, session, tau):
            length = await session.page.evaluate("history.length")
            tabs = len(session.browser_context.pages)
            histories.append((session.page.url, length, tabs))

    base = site({path: counted(path) for path in PAGES})
    texts = [
        'do(action="Type", argument="hello", element="1")',
        'do(action="Click", element="9")',
        'do(action="Click", element="0")',
        "go_backward()",
        "go_forward()",
        'exit(message="red")',
    ]
    acting = scripted(chat, texts)
    task = everything(base) | task_at(base)
    settings = rollout.Settings(max_turns=9, max_new_tokens=99, max_context=4000, timeout=10)

    def noticed(env):
        """One episode, and all that its agent and its site could notice."""
        requests.clear()
        histories.clear()
        tau, = run(rollout.play(acting, chat, [task], env, settings))
        pages = [(turn.url, turn.observation, turn.error) for turn in tau.turns]
        asked = [path for path in requests if "favicon" not in path]
        return tau, (pages, asked, list(histories), tau.status, tau.answer)

    _, unwatched = noticed(Curious())
    tau, watched = noticed(checklist.Watched(Curious(), 10))
    assert unwatched == watched
    assert len(tau.turns) == 6

    places = places_of(task)
    seen = {}
    for c, turn in tau.seen.items():
        place = places[c]
        if place == "last":
            place = f"last {c}"
        seen[place] = turn
    assert seen == {
        "last 5": -1,
        "last 6": -1,
        "url_match": 2,
        f"{base}/two": 2,
    }


def test_a_page_that_does_not_answer_costs_a_look_and_not_the_episode(site, chat, run):
    task = task_with(1) | task_at(site({"/": "<p>lamp</p>"}))
    page, = task["eval"]["program_html"]
    page["locator"] = "document.fonts.ready.then(() => new Promise(() => 0))"  # for ever
    settings = rollout.Settings(max_turns=2, max_new_tokens=99, max_context=4000, timeout=5)
    acting = scripted(chat, ['do(action="Wait")', "exit()"])
    env = checklist.Watched(Env(), 0.3)

    tau, = run(rollout.play(acting, chat, [task], env, settings))

    assert len(tau.turns) == 2
    assert tau.status == "ok"
    assert tau.seen == {}


def half_an_expert(chat, n_actions):
    """An Act: the sandbox's expert, who does no more than n_actions and exits instead."""
    experts = {}

    async def act(tau, slot):
        if len(tau.turns) == 1:
            experts[slot] = sandbox.expert(tau.task)
        _, action = experts[slot](tau.turns[-1].observation)
        if len(tau.turns) > n_actions:
            action = 'exit(message="")'
        return [*chat.encode(action), chat.end_id], [], True
    return act


def test_on_the_sandbox_half_a_task_earns_its_half(sandbox_sites, chat, run, tmp_path):
    """Template 28, "log out and set my bio": an expert sets the bio first, and half an expert stops there."""
    tasks = site_urls(sandbox.tasks("train", 1, template=28), sandbox_sites)
    settings = rollout.Settings(max_turns=12, max_new_tokens=99, max_context=9000, timeout=20)
    env = checklist.Watched(Environment(sandbox_sites, tmp_path), 20)
    method = checklist_of(chat)

    def play_expert(n_actions):
        acting = half_an_expert(chat, n_actions)
        tau, = run(rollout.play(acting, chat, tasks, env, settings))
        return tau

    idle = play_expert(0)
    assert method.reward(idle) == 0.0
    whole = play_expert(99)
    assert method.reward(whole) == 1.0
    assert whole.success == 1

    met = checklist.checks_met(whole)
    assert len(met) == 2
    assert None not in met.values()  # the agent was on both pages, so both turns are known

    def check_named(text):
        for c, check in enumerate(whole.checks):
            if text in check.name:
                return c

    bio = check_named("exact")
    out = check_named("log in")
    assert met[bio] < met[out]
    partly = play_expert(met[bio] + 1)
    assert partly.success == 0
    assert method.reward(partly) == pytest.approx(1 / 3)
    assert checklist.checks_met(partly) == {bio: met[bio]}


# ---------------------------------------------------------------------------------------------- the script


def on_one_and_two_ranks(fork, tasks, sites, monkeypatch, tmp_path, *more):
    """Two steps in the browser, on one rank in this process and on two as a user starts them: both metrics."""
    base = ROOT / "worlds/base"
    for variable, address in sites.items():
        monkeypatch.setenv(variable, address)

    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = [
            "--model", base,
            "--tasks", tasks,
            "--out", out,
            "--steps", 2,
            "--batch", 3,
            "--G", 3,
            "--max-turns", 3,
            "--max-new-tokens", 24,
            "--concurrency", 1,
            "--lr", 1e-5,
            "--temperature", 1.0,
            *more,
        ]
        if ranks == 1:
            cfg = parse(fork, monkeypatch, *arguments)
            mgrpo.main(cfg, METHODS[fork])
        else:
            name = fork.__name__.replace(".", "/")
            done = script(f"{name}.py", *arguments, ranks=2, env=ENV | sites)
            assert done.returncode == 0, done.stderr

        lines = read(out / "metrics.jsonl")
        found.append(lines)
        assert [line["step"] for line in lines] == [0, 1]
        assert set(load(out).state_dict()) == set(load(base).state_dict())
        assert (out / "report.html").exists()
        assert len(read(out / "trajectories.jsonl")) == 18

    for one, two in zip(*found, strict=True):
        assert set(METRICS) <= set(one)
        for key in ["reward", "success_rate", "loss", "grad_norm", "entropy", "groups_kept"]:
            if one[key] is None:  # no group of the step held both outcomes
                assert two[key] is None, key
            else:
                assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-7), key
        # Each rank writes the system prompt, and what else its episodes share.
        assert one["tokens_packed"] == pytest.approx(two["tokens_packed"], rel=0.02)
    assert any(line["grad_norm"] for line in found[0])
    return found


@pytest.mark.slow
def test_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(checklist, pointing, sandbox_sites, monkeypatch, tmp_path)
    for one, two in zip(*found, strict=True):
        assert one["groups_revived"] == two["groups_revived"]
        if one["logp_gap"] is not None:
            assert one["logp_gap"] < 1e-5
            assert two["logp_gap"] < 1e-5


def checked(chat):
    """A stand-in for rollout: all episodes fail, and some meet a check."""
    async def rollout(model, chat_, tasks, *, env, settings, group_size, seed, temperature, **_):
        assert isinstance(env, checklist.Watched)
        played = []
        for task in tasks:
            task_id = task["task_id"]
            for i in range(group_size):
                turn = i % 2
                seen = {}
                if (i + task_id) % 2:
                    seen = {0: turn}
                of_episode = task_with(2) | task
                of_episode["intent"] = "do it"
                of_episode["sites"] = ["x"]
                tau = episode(chat, of_episode, 2 + turn, [False, False], seen, seed=task_id, member=i)
                played.append(tau)
        return played
    return rollout


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, monkeypatch, tmp_path):  # noqa: F811
    """Bit for bit, rewards included; and every step learns although nobody ever succeeds."""
    entries = [{"weight": 2}, {"needs": [0]}]
    tasks = [task_with(2, entries) | {"task_id": i} for i in range(7)]

    def load_tasks(*args, **kwargs):
        return tasks

    def task_batch(tasks, step, cfg):
        return [tasks[(step + i) % 7] for i in range(cfg.batch)]

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await checked(chat)(*args, seed=seed, **kwargs)

    monkeypatch.setattr(mgrpo.worlds, "load_tasks", load_tasks)
    monkeypatch.setattr(mgrpo.worlds, "check_files", lambda *specs: None)
    monkeypatch.setattr(mgrpo, "task_batch", task_batch)
    whole = play(checklist, checked(chat), "whole")
    assert len(play(checklist, interrupted, "parts", save_every=2)) == 3
    parts = play(checklist, checked(chat), "parts", save_every=2)

    def timeless(lines):
        found = []
        for line in lines:
            found.append({k: v for k, v in line.items() if "second" not in k})
        return found

    assert timeless(parts) == timeless(whole)
    assert [line["groups_revived"] for line in whole] == [6] * 5
    for line in whole:
        assert line["success_rate"] == 0
        assert line["grad_norm"] > 0
        assert line["reward"] > 0

    def records(out):
        found = []
        for record in read(tmp_path / out / "trajectories.jsonl"):
            found.append([record[key] for key in ("task_id", "member", "reward", "checks")])
        return found

    assert records("whole") == records("parts")
    assert len(records("whole")) == 60
    weights = load(tmp_path / "whole").state_dict()
    continued = load(tmp_path / "parts").state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, continued[name])


def test_parts_have_the_judges_order():
    """An answer with two texts that a model judges is one check: the verdicts are told apart by their places."""
    contents = {"must_include": ["a", "b"], "fuzzy_match": ["c", "d"]}
    elsewhere = {"url": "http://h/cart", "locator": "", "required_contents": {"exact_match": "x"}}
    task = make_task(
        eval_types=["program_html", "verify", "url_match", "string_match"],
        reference_answers=contents,
        reference_url="http://h/a",
        verify="judge.py",
        program_html=[elsewhere, elsewhere | {"url": "last"}],
    )
    places = [(part.place, part.n_checks) for part in checklist.parts(task)]
    assert places == [("answer", 3), ("url_match", 1), ("verify", 1), ("last", 1), ("http://h/cart", 1)]
