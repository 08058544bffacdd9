"""People look on: the report as a player, pictures with a frame around the element, a window."""
import asyncio
import base64
import json
import os
import time
from types import SimpleNamespace

import pictures
import pytest
from conftest import ROOT, Env, execute, listen, make_task, scripted, task_at

import evaluate
from compress import Trajectory, Turn, to_record
from evaluate import SiteSettings, Config, Environment
from rollout import Settings, play
from run import embed_screenshots, open_run, report
from worlds import onlooker
from worlds.browser import Browser, Session, find_chromium

# --------------------------------------------------------------------------------------------- the report

HOSTILE = ("</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
           "&lt;b&gt;")
RATE = {  # of a split, a site or a template
    "success_rate": .5,
    "ci95": [.2, .8],
    "n": 4,
}


def write_rows(file, rows):
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines))


def read_rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_summary(path, splits, **more):
    summary = {"splits": splits, **more}
    (path / "summary.json").write_text(json.dumps(summary))


def write_run(path, n=5):
    """A finished run's files, with text in every place that tries to break out."""
    run = open_run(Config(out=str(path)), "cpu", first_step=0)
    run.begin({}, first_step=0)
    for step in range(30):
        run.write_metrics({
            "step": step,
            "success_rate": step / 30,
            "trajectory_tokens": 900 + step,
            "turns": 5 - step / 30,
            "kl": 1e-3,
            "entropy": .5,
            "logp_gap": 1e-6,
            "env_errors": 0,
            "seconds_rollout": 3.0,
            "seconds_train": 2.0,
        })

    turn = {
        "url": "http://h/" + HOSTILE,
        "observation": HOSTILE,
        "response": "ab" + HOSTILE,
        "action": HOSTILE,
        "error": HOSTILE,
        "tokens": ["a", "b" + HOSTILE],
        "logps": [-.1, -2.],
        "context_tokens": 9,
        "truncated": False,
    }
    episodes = []
    for i in range(n):
        odd = bool(i % 2)
        episode = {
            "step": i,
            "split": "train",
            "task_id": i,
            "sites": ["shopping"],
            "template": 1,
            "intent": f"task number {i} {HOSTILE}",
            "member": 0,
            "success": float(odd),
            "reward": -float(odd),
            "advantage": .5,
            "status": "ok",
            "answer": HOSTILE,
            "checks": [["exact_match " + HOSTILE, odd, HOSTILE]],
            "turns": [turn],
        }
        if odd:
            episode["split"] = "test"
            episode["sites"] = ["reddit"]
        if i == 0:
            episode["status"] = "env_error"
        episodes.append(episode)
    run.append("trajectories.jsonl", episodes)

    summary = RATE | {
        "turns": 2.0,
        "env_errors": 1,
        "per_site": {HOSTILE: RATE},
    }
    write_summary(path, {HOSTILE: summary})


HELP = """window.node = rule => document.querySelector(rule);
          window.nodes = rule => [...document.querySelectorAll(rule)];
          window.textOf = rule => node(rule).textContent;
          window.texts = rule => nodes(rule).map(n => n.textContent);"""


@pytest.fixture
def look_at(run):
    """look_at(path of a report, script) -> (its result, what the browser complains of, what it asked for).

    fragment: of the address that is opened. keys: pressed before the script runs.
    """
    async def visit(path, script, fragment, keys):
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page()
            await page.add_init_script(HELP)
            complaints, asked = listen(page)
            await page.goto(path.absolute().as_uri() + fragment)
            for key in keys:
                await page.keyboard.press(key)
            result = await page.evaluate(script)
            return result, complaints, asked

    def look(path, script, fragment="", keys=()):
        return run(visit(path, script, fragment, keys))
    return look


def test_the_report_opens_without_a_network_and_hostile_text_in_it_is_inert(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, asked = look_at(report(tmp_path), """() => ({
        title: document.title,
        images: document.images.length,
        charts: nodes('.chart').length,
        said: textOf('.said'),
        page: textOf('.page'),
        scripts: document.scripts.length,
        cells: nodes('td').length,
    })""")
    assert complaints == []
    assert len(asked) == 1
    assert seen["title"] == tmp_path.name
    assert seen["images"] == 0
    assert seen["scripts"] == 2
    assert seen["charts"] == 8
    assert seen["cells"] == 14
    assert seen["page"] == HOSTILE
    assert seen["said"] == "ab" + HOSTILE


def test_held_out_success_stands_beside_that_of_the_sampled_episodes(look_at, tmp_path):
    write_run(tmp_path)
    for success in ("success_rate", "reward"):  # runs of older versions have both, the oldest only the second
        first = {"step": 0, success: 0.25}
        second = {"step": 1, success: 0.5, "held_out_success": 0.75}
        write_rows(tmp_path / "metrics.jsonl", [first, second])
        seen, complaints, _ = look_at(report(tmp_path), "() => textOf('.chart')")
        assert complaints == []
        assert seen.startswith("Successsampled 50% · held out 75% at 1")


def test_a_chart_of_one_step_names_that_step(look_at, tmp_path):
    """The axis is widened by a step on either side, and its end was taken for the newest step."""
    write_run(tmp_path)
    write_rows(tmp_path / "metrics.jsonl", [{"step": 4, "success_rate": 0.25}])
    seen, _, _ = look_at(report(tmp_path), "() => textOf('.chart')")
    assert seen.startswith("Successsampled 25% at 4")


def test_an_episodes_outcome_is_its_success_whatever_its_reward_is(look_at, tmp_path):
    """Records of older versions have only a reward, which was the success."""
    write_run(tmp_path)
    file = tmp_path / "trajectories.jsonl"
    _, *rows = read_rows(file)  # the first one is an error of the environment
    rows[0] |= {"success": 1.0, "reward": -0.5}
    rows[1] |= {"success": 0.0, "reward": 0.4}
    del rows[2]["success"]
    del rows[3]["success"]
    rows[2]["reward"] = 1.0
    rows[3]["reward"] = 0.0
    write_rows(file, rows)

    seen, complaints, _ = look_at(report(tmp_path), "() => nodes('#list .dot').map(dot => dot.title)")
    assert seen == ["failure", "success", "failure", "success"]  # the newest first
    assert complaints == []


def test_without_a_valid_episode_the_report_shows_no_rate(look_at, tmp_path):
    write_run(tmp_path)
    none = {
        "success_rate": None,
        "ci95": [0.0, 1.0],
        "n": 0,
        "turns": None,
        "env_errors": 4,
    }
    split = none | {
        "per_site": {"reddit": none},
        "per_template": {"1": none | {"template": "open it"}},
    }
    write_summary(tmp_path, {"test": split})

    seen, complaints, _ = look_at(report(tmp_path), """() => [
        texts('#tables tbody tr'),
        nodes('.track b').length,
        texts('.bars > div'),
    ]""")
    rows, bars, names = seen
    assert rows[0].endswith("–0.0–100.0%04")
    assert bars == 0
    assert names == ["open it"]
    assert complaints == []


def test_odd_values_leave_the_report_readable(look_at, tmp_path):
    """A template without a name, a summary without an interval, two values that differ by rounding alone."""
    write_run(tmp_path)
    metrics = []
    for step, value in enumerate([.3, .3 + 5e-17, .3]):
        metrics.append({"step": step, "success_rate": value, "turns": None})
    write_rows(tmp_path / "metrics.jsonl", metrics)
    plain = {"success_rate": .5, "n": 4}
    nameless = plain | {"template": None}
    split = plain | {"per_template": {"1": nameless}}
    write_summary(tmp_path, {"test": split})

    seen, complaints, _ = look_at(report(tmp_path), """() => [
        nodes('.chart').length,
        nodes('#tables tbody tr').length,
        nodes('.bars > div').length,
        nodes('#list button').length,
    ]""")
    assert seen == [1, 1, 1, 5]
    assert complaints == []


def test_an_action_in_words_takes_the_elements_name_and_not_its_value(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, _ = look_at(report(tmp_path), r"""() => {
        const observation = '<input>Qty <2> = 3</input> <button>buy <3></button> <textarea>note <4></textarea>';
        const actions = [
            'do(action="Type", argument="5", element="2")',
            'do(action="Click", element="3")',
            'do(action="Type", argument="a\\nb", element="4")',
        ];
        return actions.map(action => inWords({action, observation}));
    }""")
    assert seen == ["Type “5” in “Qty”", "Click “buy”", "Type “a\nb” in “note”"]
    assert complaints == []


def test_the_report_filters_and_opens_episodes(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, _ = look_at(report(tmp_path), """() => {
        const set = (id, value) => {
            const field = node('#' + id);
            field.value = value;
            field.dispatchEvent(new Event('input'));
        };
        const listed = () => nodes('#list button').length;

        const out = [listed()];
        set('split', 'test');
        out.push(listed());
        set('split', '');

        set('site', 'shopping');
        out.push(listed());
        set('site', '');

        set('outcome', 'success');
        out.push(listed());
        set('outcome', 'environment error');
        out.push(listed());
        set('outcome', '');

        set('text', 'NUMBER 3');
        out.push(listed());
        node('#list button').click();
        return [out, textOf('.intent').slice(0, 13), nodes('.checks li.ok').length];
    }""")
    listed, intent, passed = seen
    assert listed == [5, 2, 3, 2, 1, 1]
    assert intent == "task number 3"
    assert passed == 1
    assert complaints == []


def test_the_report_takes_the_newest_episodes_and_says_what_it_leaves_out(look_at, tmp_path):
    write_run(tmp_path, n=2100)
    with open(tmp_path / "trajectories.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "spl')  # a run that is being written
    seen, _, _ = look_at(report(tmp_path), "() => [textOf('#count'), textOf('.intent')]")
    count, first = seen
    assert "1999 episodes" in count
    assert "102 older ones" in count
    assert first.startswith("task number 2099")


def test_a_number_that_json_does_not_know_leaves_the_report_readable(look_at, tmp_path):
    write_run(tmp_path)
    file = tmp_path / "trajectories.jsonl"
    text = file.read_text()
    file.write_text(text.replace("-0.1", "NaN"))  # the policy diverged
    seen, complaints, _ = look_at(report(tmp_path), "() => nodes('#list button').length")
    assert seen == 5
    assert complaints == []


def test_a_run_without_a_step_has_a_report(look_at, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    _, complaints, _ = look_at(report(tmp_path), "() => 0")
    assert complaints == []


# --------------------------------------------------------------------------------------------- the player

JPEG = base64.b64decode(  # one white pixel
    "/9j/4AAQSkZJRgABAQEASABIAAD/2wBDAP////////////////////////////////////////////////////////////////////////////////"
    "//////wgALCAABAAEBAREA/8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAAgBAQABPxA=")
PAGE = "<a>cart <0></a> <input>search <5> = tea</input>\n<a>red &lt;lamp&gt; <15></a>"
SEARCH = "do(action='Search', argument='a \\'b\\'', element='5')"
CLICK = "do(action='Click', element='15')"
EXIT = "exit(message='$3')"
SEARCHED = "Search “a 'b'” in “search”"  # in the report's words
CLICKED = "Click “red <lamp>”"


def write_group(path, steps=(3,), hostile=""):
    """A run whose steps played one group each: both members search, one exits, one clicks and never exits."""
    (path / "screenshots").mkdir(parents=True)

    def turn(k, action, **more):
        picture = f"screenshots/{k}.jpg"
        (path / picture).write_bytes(JPEG)
        thought = "hm" + hostile
        return {
            "url": "http://h/",
            "observation": PAGE,
            "response": f"<think>{thought}</think><answer>{action}</answer>",
            "action": action,
            "error": "",
            "tokens": ["<think>", thought, "</think>", f"<answer>{action}", "</answer>"],
            "logps": [0, -1, 0, 0, 0],
            "context_tokens": 9,
            "shot": {"file": picture, "frame": [640, 360, 64, 36]},
            **more,
        }

    rows = []
    for step in steps:
        shared = {
            "step": step,
            "split": "train",
            "task_id": 17,
            "sites": ["shop"],
            "intent": "find it",
            "status": "ok",
        }
        rows.append(shared | {
            "member": 0,
            "success": 1.0,
            "reward": 1.0,
            "advantage": .7,
            "answer": "$3",
            "checks": [["exact_match “$3”", True, ""]],
            "turns": [turn(0, SEARCH), turn(1, EXIT)],
        })
        search = turn(0, SEARCH)
        click = turn(2, CLICK, shot={"file": "screenshots/2.jpg", "frame": None})
        unread = turn(3, "", error="no action found" + hostile, shot={"file": "gone", "frame": None})
        rows.append(shared | {
            "member": 1,
            "success": 0.0,
            "reward": 0.25,
            "advantage": -.7,
            "answer": None,
            "checks": [["exact_match “$3”", False, "no"]],
            "turns": [search, click, unread],
        })
    write_rows(path / "trajectories.jsonl", rows)
    return report(path)


SHOWN = """() => [
    textOf('#turn'),
    textOf('.did'),
    location.hash,
    node('#stage img') !== null,
    textOf('#strip [aria-current=true] > span:last-child'),
]"""


def test_a_fragment_opens_an_episode_at_a_turn(look_at, tmp_path):
    path = write_group(tmp_path / "run", steps=(3, 4))
    fragment = "#split=train&step=3&task=17&member=1&turn=2"
    seen, complaints, _ = look_at(path, SHOWN, fragment)
    assert seen == ["Turn 2 of 3", CLICKED, fragment, True, CLICKED]
    assert complaints == []


def test_a_fragment_that_is_pasted_later_is_followed(look_at, tmp_path):
    path = write_group(tmp_path / "run", steps=(3, 4))
    seen, _, _ = look_at(path, """async () => {
        location.hash = '#step=3&task=17&member=0&turn=9';
        await new Promise(done => addEventListener('hashchange', () => setTimeout(done)));
        return [textOf('#turn'), nodes('.chip')[4].textContent];
    }""")
    assert seen == ["Turn 2 of 2", "step 3"]


@pytest.mark.parametrize("members, said", [
    ([(1.0, 0.7, "ok"), (0.0, -0.7, "ok")], "Its group: 1 of 2 succeeded"),
    ([(0.0, 0.0, "ok"), (0.0, 0.0, "ok")], "Its group: 0 of 2 succeeded; its rewards are all equal, so M-GRPO drops it"),
    ([(1.0, 0.0, "ok"), (0.0, 0.0, "env_error")], "; its rewards are all equal, so M-GRPO drops it"),
    ([(1.0, 0.0, "ok"), (0.0, 0.0, "ok")], "Its group: 1 of 2 succeeded"),  # DigiRL clones none of its turns
])
def test_only_a_group_of_equal_rewards_and_no_advantages_is_said_to_be_dropped(look_at, tmp_path, members, said):
    path = write_group(tmp_path / "run")
    rows = [json.loads(line) for line in (path.parent / "trajectories.jsonl").read_text().splitlines()]
    for row, (reward, advantage, status) in zip(rows, members, strict=True):
        row.update(reward=reward, success=reward, advantage=advantage, status=status)
    write_rows(path.parent / "trajectories.jsonl", rows)
    shown, complaints, _ = look_at(report(path.parent), "() => textOf('.group h3')", "#step=3&task=17&member=0")
    assert shown.endswith(said)
    assert complaints == []


def test_a_picture_that_is_not_in_the_file_is_named(look_at, tmp_path):
    path = write_group(tmp_path / "run")
    script = "() => [textOf('#stage .num'), node('#stage img')]"
    seen, _, _ = look_at(path, script, "#step=3&task=17&member=1&turn=3")
    below, picture = seen
    assert below == "9 tokens of context · 5 tokens said · its picture is not in this file: gone"
    assert picture is None


def test_the_newest_episode_with_pictures_opens_first(look_at, tmp_path):
    write_group(tmp_path / "run", steps=(3, 4))
    file = tmp_path / "run/trajectories.jsonl"
    rows = read_rows(file)
    of_step_4 = rows[2:]
    for row in of_step_4:
        for turn in row["turns"]:
            del turn["shot"]
    write_rows(file, rows)

    path = report(tmp_path / "run")
    seen, _, _ = look_at(path, "() => [textOf('#list [aria-current=true] small'), texts('#list small')]")
    opened, listed = seen
    assert opened == "train · step 3 · shop · 3 turns · screenshots"
    assert listed == [
        "train · step 4 · shop · 3 turns",
        "train · step 4 · shop · 2 turns",
        "train · step 3 · shop · 3 turns · screenshots",
        "train · step 3 · shop · 2 turns · screenshots",
    ]


def test_an_old_episode_is_listed_when_a_fragment_opens_it(look_at, tmp_path):
    path = write_group(tmp_path / "run", steps=range(200))
    seen, _, _ = look_at(path, "() => textOf('#list [aria-current=true] small')", "#step=0&task=17")
    assert "step 0" in seen


@pytest.mark.parametrize("keys, turn, did", [
    ([], 1, SEARCHED),
    (["ArrowRight"], 2, CLICKED),
    (["ArrowLeft"], 1, SEARCHED),
    (["ArrowRight"] * 5, 3, "no action could be read"),
    (["j", "ArrowRight"], 2, "exit “$3”"),
    (["ArrowRight", "ArrowRight", "ArrowLeft"], 2, CLICKED),
    (["j", "ArrowRight", "k"], 1, SEARCHED),
])
def test_keys_go_through_turns_and_episodes(keys, turn, did, look_at, tmp_path):
    path = write_group(tmp_path / "run")
    seen, complaints, _ = look_at(path, SHOWN, keys=keys)
    now, shown, fragment, *_ = seen
    assert now.startswith(f"Turn {turn} of")
    assert shown == did
    assert complaints == []
    assert (f"turn={turn}" in fragment) == bool(keys)  # the address can be copied


def test_slider_buttons_and_thumbnails_go_to_a_turn(look_at, tmp_path):
    path = write_group(tmp_path / "run")
    seen, complaints, _ = look_at(path, """() => {
        const now = () => textOf('#turn');
        const slider = node('#slider');
        slider.value = 3;
        slider.dispatchEvent(new Event('input'));
        const out = [now()];

        node('.turns button').click();
        out.push(now(), slider.value);

        nodes('#strip button')[0].click();
        out.push(now(), slider.value);
        return [...out, nodes('#strip img').length, node('.turns button').disabled];
    }""")
    assert seen == ["Turn 3 of 3", "Turn 2 of 3", "2", "Turn 1 of 3", "1", 2, True]
    assert complaints == []


def test_typing_into_the_search_field_moves_nothing(look_at, tmp_path):
    path = write_group(tmp_path / "run")
    keys = ["Tab", "g", "j", "ArrowRight"]
    seen, _, _ = look_at(path, "() => [document.activeElement.id, textOf('#turn')]", keys=keys)
    assert seen == ["text", "Turn 1 of 3"]


def test_tokens_take_the_advantages_colour_and_more_of_it_the_less_probable_they_were(look_at, tmp_path):
    path = write_group(tmp_path / "run")
    seen, _, _ = look_at(path, """() => {
        const tokens = () => nodes('.said span').map(t => [t.className, t.style.getPropertyValue('--p')]);
        const first = tokens();
        nodes('.members button')[0].click();
        const second = tokens();
        return [first[1], first[3], second[1]];
    }""")
    assert seen == [["down", "0.44"], ["down tag", "0.00"], ["up", "0.44"]]  # 0.7 times 1 - 1/e


@pytest.mark.parametrize("config, kind", [({}, "even"), ({"credit_errors": True}, "up")])
def test_a_response_that_failed_is_not_shown_as_made_likelier(config, kind, look_at, tmp_path):
    """It gets no credit for its episode's success."""
    path = write_group(tmp_path / "run").parent
    rows = read_rows(path / "trajectories.jsonl")
    rows[1]["advantage"] = 0.7
    write_rows(path / "trajectories.jsonl", rows)
    (path / "config.json").write_text(json.dumps({"run": config}))
    third = "#step=3&task=17&member=1&turn=3"  # no action could be read
    seen, _, _ = look_at(report(path), "() => [nodes('.said span')[1].className, textOf('.said + p')]", third)
    assert seen[0] == kind
    assert seen[1].startswith("This response failed" if kind == "even" else "The advantage is +0.70")


def test_the_advantage_of_a_turn_adds_to_that_of_its_episode(look_at, tmp_path):
    """As in forks/gigpo.py. The report took the episode's alone."""
    path = write_group(tmp_path / "run").parent
    rows = read_rows(path / "trajectories.jsonl")
    rows[1]["advantage"] = 0.5
    rows[1]["turns"][0]["advantage"] = -0.8
    write_rows(path / "trajectories.jsonl", rows)
    first = "#step=3&task=17&member=1&turn=1"
    said, _, _ = look_at(report(path), "() => textOf('.said + p')", first)
    assert said.startswith("The advantage is \u22120.30: the update makes these tokens less likely")


def test_an_episode_without_a_group_is_played_after_one_side_by_side(look_at, tmp_path):
    """It once showed neither the group nor the player."""
    path = write_group(tmp_path / "run", steps=(3, 4)).parent
    rows = read_rows(path / "trajectories.jsonl")
    write_rows(path / "trajectories.jsonl", rows[1:])  # the first step's group has one member left
    seen, _, _ = look_at(report(path), "() => [node('.side') !== null, textOf('#turn')]", keys=["g", "j", "j"])
    assert seen == [False, "Turn 1 of 3"]


def test_a_group_stands_side_by_side_with_rewards_and_where_its_members_part(look_at, tmp_path):
    path = write_group(tmp_path / "run")
    seen, complaints, _ = look_at(path, """() => {
        const out = [texts('.side thead th'), texts('.side tbody tr'), nodes('.side img').length];
        nodes('.side tbody button')[3].click();
        return [...out, textOf('#turn'), textOf('.intent'), !node('.side')];
    }""", keys=["g"])
    heads, rows, pictures, turn, _, closed = seen
    assert heads == ["", "member 0 reward 1+0.70", "member 1 ◂reward 0.25−0.70"]
    assert rows == [
        "1" + SEARCHED * 2,
        "from here on they differ",
        "2exit “$3”Click “red <lamp>”",
        "3no action could be readno action found",
        "answer “$3”never exited✗ exact_match “$3”",
    ]
    assert pictures == 4
    assert turn == "Turn 2 of 3"
    assert closed is True
    assert complaints == []


@pytest.mark.parametrize("turn, width", [(1, "161.29%"), (2, "100%")])
def test_a_picture_without_a_frame_is_shown_whole(turn, width, look_at, tmp_path):
    """Of one with a frame a part is shown, to be read: 0.62 of its width."""
    path = write_group(tmp_path / "run")
    fragment = f"#split=train&step=3&task=17&member=1&turn={turn}"
    seen, _, _ = look_at(path, "() => node('#stage .shot > span').style.width", fragment)
    assert float(seen.rstrip("%")) == pytest.approx(float(width.rstrip("%")), abs=0.01)


def test_hostile_text_is_inert_in_the_player_and_in_the_group(look_at, tmp_path):
    # 1) Hostile text in every field of every episode.
    path = write_group(tmp_path / "run", hostile=HOSTILE)
    file = tmp_path / "run/trajectories.jsonl"
    rows = read_rows(file)
    for row in rows:
        for field in ("answer", "intent", "split", "task_id"):
            row[field] = HOSTILE
        row["checks"] = [[HOSTILE, False, HOSTILE]]
        for turn in row["turns"]:
            turn["observation"] = f"<a>{HOSTILE} <15></a>"
            turn["url"] = HOSTILE
            turn["action"] = f"do(action='{HOSTILE}', argument=\"x\", element='15')"
            turn["shot"]["frame"] = [640, "1;background:url(http://127.0.0.1:1/x)", None, 5]
    write_rows(file, rows)

    # 2) And in the summary.
    template = RATE | {"template": HOSTILE}
    summary = RATE | {"per_template": {HOSTILE: template}}
    write_summary(tmp_path / "run", {HOSTILE: summary}, run={"model": HOSTILE})

    # 3) As an episode, as a group, and as an episode again.
    inside = """() => [
        document.title,
        document.scripts.length,
        nodes('img').every(image => image.src.startsWith('data:image/jpeg')),
    ]"""
    for keys in (["ArrowRight"], ["g"], ["g", "g"]):
        seen, complaints, asked = look_at(report(path.parent), inside, keys=keys)
        title, scripts, pictures_are_ours = seen
        assert title == "run"
        assert scripts == 2
        assert pictures_are_ours is True
        assert complaints == []
        assert len(asked) == 1


def test_compared_runs_stand_in_one_picture_template_by_template(look_at, tmp_path, capsys):
    shares = {"base": 0.0, "bc": 0.25, "r1": 0.75}
    for name, share in shares.items():
        figures = {
            "success_rate": share,
            "ci95": [share / 2, share / 2 + .5],
            "n": 4,
            "turns": 2.0,
            "env_errors": 0,
        }
        templates = {
            "3": figures | {"template": "open {{name}}"},
            "4": figures | {"template": "buy {{name}}", "success_rate": 1 - share},
        }
        (tmp_path / name).mkdir()
        write_summary(tmp_path / name, {"test": figures | {"per_template": templates}})

    runs = [str(tmp_path / name) for name in shares]
    evaluate.main(Config(compare=",".join(runs)))
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"report: {tmp_path}/r1/report.html (")
    assert said[-1].endswith(" MB)")

    seen, complaints, _ = look_at(tmp_path / "r1/report.html", """() => [
        texts('.legend span'),
        node('.bars').parentElement.open,
        texts('.bars > div'),
        nodes('.bar').slice(0, 3).map(n => [n.querySelector('b').style.width, n.querySelector('u').style.left]),
    ]""")
    legend, is_open, rows, bars = seen
    assert legend == ["base", "bc", "r1"]
    assert is_open is True
    assert rows == ["open ‹name›0%25%75%", "buy ‹name›100%75%25%"]
    assert bars == [["0%", "0%"], ["25%", "12.5%"], ["75%", "37.5%"]]
    assert complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(width, run, tmp_path):
    path = write_group(tmp_path / "run")
    viewport = {"width": width, "height": 844}

    async def look():
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page(viewport=viewport)
            await page.goto(path.absolute().as_uri())
            episode = await page.evaluate("document.documentElement.scrollWidth")
            await page.keyboard.press("g")
            group = await page.evaluate("document.documentElement.scrollWidth")
            return episode, group

    episode, group = run(look())
    assert episode <= width
    assert group <= width


def test_a_report_with_2000_episodes_and_200_pictures_opens_within_two_seconds(run, tmp_path):
    write_group(tmp_path / "run", steps=range(1000))
    file = tmp_path / "run/trajectories.jsonl"
    rows = read_rows(file)
    turns = []
    for row in reversed(rows):  # the newest first, as the report takes the pictures
        turns += row["turns"]
    for k, turn in enumerate(turns):
        turn["observation"] = PAGE + "\n<a>a link with a name <16></a> and a text" * 40
        turn["shot"]["file"] = f"screenshots/big-{k}.jpg"
        if k < 200:
            picture = tmp_path / "run" / turn["shot"]["file"]
            picture.write_bytes(JPEG + os.urandom(25_000))
    write_rows(file, rows)
    path = report(tmp_path / "run")

    async def look():
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page()
            devtools = await page.context.new_cdp_session(page)
            # The page's own seconds, since the machine may be busy with something else.
            await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
            start = time.monotonic()
            await page.goto(path.absolute().as_uri())
            took = time.monotonic() - start
            assert "2000 episodes" in await page.text_content("#count")
            reply = await devtools.send("Performance.getMetrics")
            metrics = {metric["name"]: metric["value"] for metric in reply["metrics"]}
            return took, metrics["TaskDuration"]

    tries = [run(look()) for _ in range(3)]  # the least counts: now and then V8 collects garbage
    took, computed = min(tries, key=lambda one: one[1])
    megabytes = path.stat().st_size / 1e6
    print(f"{megabytes:.1f} MB opened in {took:.2f} s, of which it computed {computed:.2f}")
    assert computed < 2


# ----------------------------------------------------------------------------------------------- pictures

RED = "background:rgb(255,0,0);border:0;display:inline-block;color:rgb(255,0,0)"
FAR = "<div style='height:3000px'>a long page</div>"
BUTTON = f"<button style='{RED};width:140px;height:50px' onclick='top.at = [event.clientX, event.clientY]'>go</button>"
INNER = f"<body style='margin:0'>{FAR}<div style='padding:200px'>{BUTTON}</div>{FAR}"
PAGES = {
    "/inner": INNER,
    "/plain": "<body>" + BUTTON,
    "/far": f"<body>{FAR}<div style='padding-left:700px'>{BUTTON}</div>{FAR}",
    "/frame": f"<body>{FAR}<iframe src=/inner style='padding:17px 31px;border:9px solid;width:500px;height:400px'>"
              f"</iframe>{FAR}",
    "/scaled": f"<body>{FAR}<iframe src=/inner style='border:9px solid;width:600px;height:500px;"
               f"transform:scale(.6)'></iframe>{FAR}",
    "/nested": f"<body>{FAR}<iframe src=/frame style='border:5px solid;width:900px;height:600px'></iframe>",
    "/panel": f"<body><div style='height:300px;overflow:auto'>{FAR}{BUTTON}{FAR}</div>",
    "/field": f"<body>{FAR}<input aria-label=go style='{RED};width:200px;height:40px'>{FAR}",
    "/choice": f"<body>{FAR}<select aria-label=go style='{RED};width:200px;height:40px'>"
               f"<option>a<option>b</select>{FAR}",
}
CLICK_GO = '<think>hm</think><answer>do(action="Click", element="0")</answer>'
EXIT_X = 'exit(message="x")'
SHORT = Settings(max_context=600, max_new_tokens=60)
REDS = """async jpeg => {  // the box of the red pixels in a picture
    const image = new Image();
    image.src = 'data:image/jpeg;base64,' + jpeg;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height);
    const paint = canvas.getContext('2d');
    paint.drawImage(image, 0, 0);
    const {data} = paint.getImageData(0, 0, image.width, image.height);

    const xs = [];
    const ys = [];
    for (let i = 0; i < data.length; i += 4) {
        const red = data[i] > 200 && data[i + 1] < 60 && data[i + 2] < 60;
        if (red) {
            xs.push(i / 4 % image.width);
            ys.push(Math.floor(i / 4 / image.width));
        }
    }
    const low = values => values.reduce((a, b) => Math.min(a, b));
    const high = values => values.reduce((a, b) => Math.max(a, b)) + 1;
    return [low(xs), low(ys), high(xs) - low(xs), high(ys) - low(ys), image.width, image.height];
}"""


def test_a_picture_has_a_name_that_a_disk_takes_and_a_full_one_ends_nothing(tmp_path):
    kept = []

    async def screenshot(path, **_):
        kept.append(path)
        if len(kept) > 1:
            raise OSError("no space left")

    session = SimpleNamespace(page=SimpleNamespace(screenshot=screenshot))
    for shot in (True, False):
        turn = Turn("", "", [], [], [], "")
        asyncio.run(onlooker.photograph(session, turn, None, tmp_path, "\u00e9" * 300 + "-7-0-1"))
        assert bool(turn.shot) == shot
    assert len(kept[0].name.encode()) <= 255
    assert kept[0].name.endswith("-7-0-1.jpg")


@pytest.mark.parametrize("path, action", [
    ("/field", "Type"),
    ("/choice", "Select Dropdown Option"),
    ("/plain", "Click"),
    ("/far", "Click"),
    ("/frame", "Click"),
    ("/scaled", "Click"),
    ("/nested", "Click"),
    ("/panel", "Click"),
])
def test_the_frame_lies_on_the_element_that_is_acted_upon(path, action, site, browse, tmp_path):
    """Compared with the pixels of the picture, and with where the click arrives."""
    call = f'do(action="{action}", argument="b", element="0")'
    if action == "Click":
        call = 'do(action="Click", element="0")'
    turn = Turn("", "", [], [], [], call)
    trajectory = Trajectory(make_task(), turns=[turn])

    async def look(session):
        await session.observe()
        env = Environment({}, tmp_path, SiteSettings(screenshots=1))
        env.begin_batch([trajectory.task], name="here")
        await env.watch(session, trajectory)
        await execute(session, turn.response)
        clicked = await session.page.evaluate("window.at")

        file = turn.shot["file"]
        frame = turn.shot["frame"]
        assert file == "screenshots/here-7-0-1.jpg"
        jpeg = (tmp_path / file).read_bytes()
        blank = await session.browser_context.new_page()
        *red, width, height = await blank.evaluate(REDS, base64.b64encode(jpeg).decode())
        assert (width, height) == (1280, 720)
        assert red == pytest.approx(frame, abs=2.5), (red, frame)

        if action == "Click":
            assert clicked
        if path in ("/plain", "/far", "/panel"):  # here the click's own numbers are the window's
            left, top, w, h = frame
            middle = [left + w / 2, top + h / 2]
            assert clicked == pytest.approx(middle, abs=1)

    browse(look, site(PAGES) + path)


def played(run, chat, tasks, texts, env, settings=SHORT, group_size=1):
    """Their episodes, played by a script. env: what watches; a success is certain."""
    side = Env()
    side.watch = env.watch
    side.visible = env.visible
    act = scripted(chat, texts)
    return run(play(act, chat, tasks, side, settings, group_size=group_size))


def test_the_first_episodes_keep_a_picture_of_every_turn_and_the_others_none(run, chat, site, tmp_path):
    tasks = [task_at(site(PAGES) + "/far", task_id=f"a/{i}") for i in range(2)]
    env = Environment({}, tmp_path, SiteSettings(screenshots=3))
    env.begin_batch(tasks, group_size=2, name="x" * 300 + "sandbox:test")
    texts = [CLICK_GO, "nothing that can be read", EXIT_X]
    episodes = played(run, chat, tasks, texts, env, group_size=2)

    records = [to_record(tau, chat) for tau in episodes]
    kept = []
    for record in records:
        kept.append(["shot" in turn for turn in record["turns"]])
    every = [True] * 3
    none = [False] * 3
    assert kept == [every, every, every, none]

    files = sorted(file.name for file in (tmp_path / "screenshots").iterdir())
    assert len(files) == 9
    assert files[0].endswith("xsandbox-test-a-0-0-1.jpg")
    shots = [turn["shot"] for turn in records[0]["turns"]]
    framed = [shot["frame"] is not None for shot in shots]
    assert framed == [True, False, False]

    embed_screenshots(records, tmp_path)
    picture = base64.b64decode(shots[0]["jpeg"])
    assert picture.startswith(b"\xff\xd8\xff")


def test_pictures_of_two_sources_with_equal_ids_are_two_files(run, chat, site, tmp_path):
    tasks = [
        task_at(site(PAGES) + "/plain"),
        task_at(site(PAGES) + "/far", source=1),
    ]
    env = Environment({}, tmp_path, SiteSettings(screenshots=2))
    env.begin_batch(tasks, name="0/4")
    episodes = played(run, chat, tasks, [EXIT_X], env)

    plain, far = [tau.turns[0].shot["file"] for tau in episodes]
    assert plain == "screenshots/0-4-0-0-1.jpg"
    assert far == "screenshots/0-4-1-0-0-1.jpg"
    assert (tmp_path / plain).read_bytes() != (tmp_path / far).read_bytes()


def test_nobody_looks_on_when_it_is_off(run, chat, site, tmp_path, monkeypatch):
    """What training pays then: one look-up a turn. No file, no message to the page."""
    tasks = [task_at(site(PAGES) + "/far")]
    env = Environment({}, tmp_path, SiteSettings())
    env.begin_batch(tasks, group_size=8, name="train")
    monkeypatch.setattr(evaluate, "spot_of_action", None)
    tau, = played(run, chat, tasks, [CLICK_GO, EXIT_X], env)
    assert tau.status == "ok"
    assert "shot" not in to_record(tau, chat)["turns"][0]
    assert not list(tmp_path.iterdir())


BOX = {
    "x": 1,
    "y": 2,
    "width": 3,
    "height": 4,
}


@pytest.mark.parametrize("spot", [
    "no object",
    None,
    {"x": 1, "y": 2},
    BOX | {"y": "2"},
    BOX | {"x": float("nan")},
    BOX | {"x": 1e99},
])
def test_whatever_a_page_says_about_itself_a_picture_has_a_frame_or_none(spot):
    assert onlooker.frame_of(spot) is None
    assert onlooker.frame_of(BOX) == [-0.5, 0, 3, 4]


def test_a_page_in_an_endless_loop_gets_no_picture_and_its_episode_goes_on(run, chat, site, tmp_path):
    hang = "<body><button onclick='setTimeout(() => { for (;;); }, 0)'>go</button>"
    tasks = [task_at(site({"/": hang}) + "/")]
    settings = Settings(max_context=600, max_new_tokens=60, timeout=4)
    env = Environment({}, tmp_path, SiteSettings(screenshots=1))
    env.begin_batch(tasks, name="t")
    tau, = played(run, chat, tasks, [CLICK_GO, EXIT_X], env, settings)
    assert tau.turns[0].shot
    assert tau.status == "env_error"  # as without pictures: the page cannot be read any more


# --------------------------------------------------------------------------------------------- a window


def test_a_machine_without_a_display_is_told_so_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    says = "--watch opens a window, but this machine has no display .*--screenshots 8"
    with pytest.raises(ValueError, match=says):
        Environment({}, tmp_path, SiteSettings(), visible=True)


def test_a_window_needs_a_chromium_that_has_windows(tmp_path, monkeypatch):
    # 1) Two on the PATH, none downloaded.
    for name in ("chromium-headless-shell", "chromium"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = tmp_path / "cache"
    downloaded = SimpleNamespace(executable_path=f"{cache}/chromium-12/linux/chrome")
    playwright = SimpleNamespace(chromium=downloaded)
    assert find_chromium(playwright) == f"{tmp_path}/chromium-headless-shell"
    assert find_chromium(playwright, visible=True) == f"{tmp_path}/chromium"

    # 2) What --only-shell downloads.
    shell = cache / "chromium_headless_shell-12" / "linux" / "chrome-headless-shell"
    shell.parent.mkdir(parents=True)
    shell.touch()
    assert find_chromium(playwright) == str(shell)
    assert find_chromium(playwright, visible=True) == f"{tmp_path}/chromium"


def test_whoever_watches_reads_thought_and_action_and_sees_the_element(run, chat, site, monkeypatch, capsys):
    """Without a window: what is printed, and the frame that Chromium is asked to draw above the page."""
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(onlooker, "PACE", 0.01)
    sent = []
    real_adopt = Session._adopt

    async def adopt(session, page):
        await real_adopt(session, page)
        devtools = session.devtools[page]
        real_send = devtools.send

        def send(name, given=None):
            sent.append((name, given))
            return real_send(name, given)
        devtools.send = send

    monkeypatch.setattr(Session, "_adopt", adopt)
    tasks = [task_at(site(PAGES) + "/plain", intent="press go")]
    env = Environment({}, "", SiteSettings(), visible=True)
    texts = [CLICK_GO, '<think>\x1b[2Jdone</think><answer>exit(message="x")</answer>']
    tau, = played(run, chat, tasks, texts, env)
    assert tau.status == "ok"

    said = capsys.readouterr().out
    parts = ["== press go", "-- turn 1: http", "hm\n   do(action", "-- turn 2"]
    places = [said.index(part) for part in parts]
    assert places == sorted(places)
    assert "\x1b" not in said

    drawn = [given for name, given in sent if name == "Overlay.highlightRect"]
    assert len(drawn) == 1
    assert drawn[0]["width"] == 140
    assert drawn[0]["height"] == 50


# ----------------------------------------------------------------------------------- the pictures of the README


def test_the_picture_of_an_episode_shows_what_was_read_thought_and_done(tmp_path):
    """Of the successes in three or four turns; the element that the action names is marked in the page's text."""
    write_group(tmp_path / "run")
    rows = read_rows(tmp_path / "run/trajectories.jsonl")
    with pytest.raises(SystemExit, match="no picture shows a success"):
        pictures.choose(rows)

    search, exits = rows[0]["turns"]
    search["shot"]["frame"] = [10, 700, 100, 60]
    click = search | {"action": CLICK, "url": "http://h/2"}
    wasteful = rows[0] | {"turns": [search, search, click, exits]}
    good = rows[0] | {"turns": [search, click, exits], "intent": "find <b>"}
    assert pictures.choose([*rows, wasteful, good]) is good

    html = pictures.agent_html(good, tmp_path / "run")
    assert html.count("<section>") == 3
    assert "find &lt;b&gt;" in html
    assert html.count("<dd>hm</dd>") == 3
    assert "<mark>&lt;input&gt;search &lt;5&gt; = tea&lt;/input&gt;</mark>" in html
    assert "<mark>&lt;a&gt;red &amp;lt;lamp&amp;gt; &lt;15&gt;&lt;/a&gt;</mark>" in html


@pytest.mark.parametrize("name", ["agent", "agent-dark", "report", "report-dark", "packing"])
def test_a_picture_of_the_readme_is_small(name):
    found = (ROOT / "assets").glob(f"{name}.[ps][nv]g")
    file = next(found)
    assert file.stat().st_size < 300_000
