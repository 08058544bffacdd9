"""People look on: the report as a player, pictures with a frame around the element, a window."""
import base64
import json
import os
import time

import pictures
import pytest
from conftest import ROOT, Env, execute, make_task, scripted, task_at

import evaluate
from compress import Trajectory, Turn
from evaluate import SiteSettings, Config, Environment
from rollout import Settings, play
from run import embed, report, start_run
from worlds import onlooker
from worlds.browser import Browser, Session, find_chromium

# --------------------------------------------------------------------------------------------- the report

HOSTILE = ("</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
           "&lt;b&gt;")


def write_run(path, n=5):
    """A finished run's files, with text in every place that tries to break out."""
    run = start_run(Config(out=str(path)), "cpu", {}, first=0)
    for step in range(30):
        run.write({"step": step, "success_rate": step / 30, "trajectory_tokens": 900 + step, "turns": 5 - step / 30, "kl": 1e-3,
                   "entropy": .5, "logp_gap": 1e-6, "env_errors": 0, "seconds_rollout": 3.0, "seconds_train": 2.0})
    turn = {"url": "http://h/" + HOSTILE, "observation": HOSTILE, "response": "ab" + HOSTILE, "action": HOSTILE,
            "error": HOSTILE, "tokens": ["a", "b" + HOSTILE], "logps": [-.1, -2.], "context_tokens": 9,
            "truncated": False}
    run.append("trajectories.jsonl", [{
        "step": i, "split": "test" if i % 2 else "train", "task_id": i, "sites": ["reddit" if i % 2 else "shopping"],
        "template": 1, "intent": f"task number {i} {HOSTILE}", "member": 0, "success": float(i % 2), "reward": -float(i % 2),
        "advantage": .5,
        "status": "env_error" if i == 0 else "ok", "answer": HOSTILE,
        "checks": [["exact_match " + HOSTILE, bool(i % 2), HOSTILE]], "turns": [turn]} for i in range(n)])
    summary = {"success_rate": .5, "ci95": [.2, .8], "n": 4, "turns": 2.0, "env_errors": 1,
               "per_site": {HOSTILE: {"success_rate": .5, "ci95": [.2, .8], "n": 4}}}
    (path / "summary.json").write_text(json.dumps({"splits": {HOSTILE: summary}}))


HELP = """window.node = rule => document.querySelector(rule);
          window.nodes = rule => [...document.querySelectorAll(rule)];
          window.textOf = rule => node(rule).textContent;
          window.texts = rule => nodes(rule).map(n => n.textContent);"""


@pytest.fixture
def look_at(run):
    """look_at(path of a report, script) -> (its result, what the browser complains of, what it asked for).

    fragment: of the address that is opened. keys: pressed before the script runs.
    """
    async def play(path, script, fragment, keys):
        complaints, asked = [], []
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page()
            await page.add_init_script(HELP)
            page.on("console", lambda m: complaints.append(m.text))
            page.on("pageerror", lambda e: complaints.append(str(e)))
            page.on("request", lambda r: asked.append(r.url))
            await page.goto(path.absolute().as_uri() + fragment)
            for key in keys:
                await page.keyboard.press(key)
            return await page.evaluate(script), complaints, asked

    return lambda path, script, fragment="", keys=(): run(play(path, script, fragment, keys))


def test_the_report_opens_without_a_network_and_hostile_text_in_it_is_inert(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, asked = look_at(
        report(tmp_path), """() => ({title: document.title, images: document.images.length,
        charts: nodes('.chart').length, said: textOf('.said'),
        page: textOf('.page'), scripts: document.scripts.length,
        cells: nodes('td').length})""")
    assert complaints == [] and len(asked) == 1
    assert seen["title"] == tmp_path.name and seen["images"] == 0 and seen["scripts"] == 2
    assert seen["charts"] == 8 and seen["cells"] == 14 and seen["page"] == HOSTILE and seen["said"] == "ab" + HOSTILE


def test_held_out_success_stands_beside_that_of_the_sampled_episodes(look_at, tmp_path):
    write_run(tmp_path)
    for success in ("success_rate", "reward"):  # runs of older versions have both, the oldest only the second
        lines = [{"step": 0, success: 0.25}, {"step": 1, success: 0.5, "held_out_success": 0.75}]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        seen, complaints, _ = look_at(report(tmp_path), "() => textOf('.chart')")
        assert complaints == [] and seen.startswith("Successsampled 50% · held out 75% at 1")


def test_an_episodes_outcome_is_its_success_whatever_its_reward_is(look_at, tmp_path):
    """Records of older versions have only a reward, which was the success."""
    write_run(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "trajectories.jsonl").read_text().splitlines()][1:]
    rows[0] |= {"success": 1.0, "reward": -0.5}
    rows[1] |= {"success": 0.0, "reward": 0.4}
    for row, reward in zip(rows[2:], (1.0, 0.0)):
        del row["success"]
        row["reward"] = reward
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen, complaints, _ = look_at(report(tmp_path), "() => nodes('#list .dot').map(dot => dot.title)")
    assert seen == ["success", "failure", "success", "failure"][::-1] and complaints == []


def test_without_a_valid_episode_the_report_shows_no_rate(look_at, tmp_path):
    write_run(tmp_path)
    none = {"success_rate": None, "ci95": [0.0, 1.0], "n": 0, "turns": None, "env_errors": 4}
    split = none | {"per_site": {"reddit": none}, "per_template": {"1": none | {"template": "open it"}}}
    (tmp_path / "summary.json").write_text(json.dumps({"splits": {"test": split}}))
    seen, complaints, _ = look_at(report(tmp_path), """() => [texts('#tables tbody tr'), nodes('.track b').length,
                                                             texts('.bars > div')]""")
    assert seen[0][0].endswith("–0.0–100.0%04") and seen[1:] == [0, ["open it"]] and complaints == []


def test_odd_values_leave_the_report_readable(look_at, tmp_path):
    """A template without a name, a summary without an interval, two values that differ by rounding alone."""
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "success_rate": value, "turns": None}) + "\n"
                                                    for i, value in enumerate([.3, .3 + 5e-17, .3])))
    plain = {"success_rate": .5, "n": 4}
    templates = {"per_template": {"1": plain | {"template": None}}}
    (tmp_path / "summary.json").write_text(json.dumps({"splits": {"test": plain | templates}}))
    seen, complaints, _ = look_at(report(tmp_path), """() => [nodes('.chart').length,
        nodes('#tables tbody tr').length, nodes('.bars > div').length,
        nodes('#list button').length]""")
    assert seen == [1, 1, 1, 5] and complaints == []


def test_an_action_in_words_takes_the_elements_name_and_not_its_value(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, _ = look_at(report(tmp_path), r"""() => {
        const observation = '<input>Qty <2> = 3</input> <button>buy <3></button> <textarea>note <4></textarea>';
        return ['do(action="Type", argument="5", element="2")', 'do(action="Click", element="3")',
                'do(action="Type", argument="a\\nb", element="4")'].map(action => inWords({action, observation}));
    }""")
    assert seen == ["Type “5” in “Qty”", "Click “buy”", "Type “a\nb” in “note”"] and complaints == []


def test_the_report_filters_and_opens_episodes(look_at, tmp_path):
    write_run(tmp_path)
    seen, complaints, _ = look_at(
        report(tmp_path), """() => {
        const set = (id, value) => { const e = node('#' + id);
                                     e.value = value; e.dispatchEvent(new Event('input')); };
        const listed = () => nodes('#list button').length, out = [listed()];
        set('split', 'test'); out.push(listed()); set('split', '');
        set('site', 'shopping'); out.push(listed()); set('site', '');
        set('outcome', 'success'); out.push(listed());
        set('outcome', 'environment error'); out.push(listed()); set('outcome', '');
        set('text', 'NUMBER 3'); out.push(listed());
        node('#list button').click();
        return [out, textOf('.intent').slice(0, 13),
                nodes('.checks li.ok').length];
    }""")
    assert seen == [[5, 2, 3, 2, 1, 1], "task number 3", 1] and complaints == []


def test_the_report_takes_the_newest_episodes_and_says_what_it_leaves_out(look_at, tmp_path):
    write_run(tmp_path, n=2100)
    with open(tmp_path / "trajectories.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "spl')  # a run that is being written
    (count, first), _, _ = look_at(
        report(tmp_path),
        "() => [textOf('#count'), textOf('.intent')]")
    assert "1999 episodes" in count and "102 older ones" in count and first.startswith("task number 2099")


def test_a_number_that_json_does_not_know_leaves_the_report_readable(look_at, tmp_path):
    write_run(tmp_path)
    text = (tmp_path / "trajectories.jsonl").read_text()
    (tmp_path / "trajectories.jsonl").write_text(text.replace("-0.1", "NaN"))  # the policy diverged
    seen, complaints, _ = look_at(report(tmp_path), "() => nodes('#list button').length")
    assert seen == 5 and complaints == []


def test_a_report_needs_nothing_but_a_directory(look_at, tmp_path):
    _, complaints, _ = look_at(report(tmp_path), "() => 0")
    assert complaints == []


# --------------------------------------------------------------------------------------------- the player

JPEG = base64.b64decode(  # one white pixel
    "/9j/4AAQSkZJRgABAQEASABIAAD/2wBDAP////////////////////////////////////////////////////////////////////////////////"
    "//////wgALCAABAAEBAREA/8QAFBABAAAAAAAAAAAAAAAAAAAAAP/aAAgBAQABPxA=")
PAGE = "<a>cart <0></a> <input>search <5> = tea</input>\n<a>red &lt;lamp&gt; <15></a>"
SEARCH, CLICK = "do(action='Search', argument='a \\'b\\'', element='5')", "do(action='Click', element='15')"
EXIT, SEARCHED = "exit(message='$3')", "Search “a 'b'” in “search”"


def write_group(path, steps=(3,), hostile=""):
    """A run whose steps played one group each: both members search, one exits, one clicks and never exits."""
    (path / "screenshots").mkdir(parents=True)
    def turn(k, action, **more):
        (path / f"screenshots/{k}.jpg").write_bytes(JPEG)
        text = f"<think>hm{hostile}</think><answer>{action}</answer>"
        return {"url": "http://h/", "observation": PAGE, "response": text, "action": action, "error": "",
                "tokens": ["<think>", "hm" + hostile, "</think>", f"<answer>{action}", "</answer>"],
                "logps": [0, -1, 0, 0, 0], "context_tokens": 9,
                "shot": {"file": f"screenshots/{k}.jpg", "frame": [640, 360, 64, 36]}, **more}
    rows = []
    for step in steps:
        shared = {"step": step, "split": "train", "task_id": 17, "sites": ["shop"], "intent": "find it",
                  "status": "ok"}
        rows += [
            shared | {"member": 0, "success": 1.0, "reward": 1.0, "advantage": .7, "answer": "$3",
                      "checks": [["exact_match “$3”", True, ""]], "turns": [turn(0, SEARCH), turn(1, EXIT)]},
            shared | {"member": 1, "success": 0.0, "reward": 0.25, "advantage": -.7, "answer": None,
                      "checks": [["exact_match “$3”", False, "no"]],
                      "turns": [turn(0, SEARCH), turn(2, CLICK, shot={"file": "screenshots/2.jpg", "frame": None}),
                                turn(3, "", error="no action found" + hostile, shot={"file": "gone", "frame": None})]}]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return report(path)


SHOWN = """() => [textOf('#turn'), textOf('.did'), location.hash,
                  node('#stage img') !== null, textOf('#strip [aria-current=true] > span:last-child')]"""


def test_a_fragment_opens_an_episode_at_a_turn(look_at, tmp_path):
    fragment = "#split=train&step=3&task=17&member=1&turn=2"
    seen, complaints, _ = look_at(write_group(tmp_path / "run", steps=(3, 4)), SHOWN, fragment)
    assert seen == ["Turn 2 of 3", "Click “red <lamp>”", fragment, True, "Click “red <lamp>”"] and complaints == []


def test_a_fragment_that_is_pasted_later_is_followed(look_at, tmp_path):
    seen, _, _ = look_at(write_group(tmp_path / "run", steps=(3, 4)), """async () => {
        location.hash = '#step=3&task=17&member=0&turn=9';
        await new Promise(done => addEventListener('hashchange', () => setTimeout(done)));
        return [textOf('#turn'), nodes('.chip')[4].textContent];
    }""")
    assert seen == ["Turn 2 of 2", "step 3"]


def test_a_picture_that_is_not_in_the_file_is_named(look_at, tmp_path):
    seen, _, _ = look_at(write_group(tmp_path / "run"), "() => [textOf('#stage .num'), node('#stage img')]",
                         "#step=3&task=17&member=1&turn=3")
    assert seen == ["9 tokens of context · 5 tokens said · its picture is not in this file: gone", None]


def test_the_newest_episode_with_pictures_opens_first(look_at, tmp_path):
    path = write_group(tmp_path / "run", steps=(3, 4))
    rows = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    for row in rows[2:]:  # those of step 4
        row["turns"] = [{key: value for key, value in turn.items() if key != "shot"} for turn in row["turns"]]
    (tmp_path / "run/trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = report(tmp_path / "run")
    seen, _, _ = look_at(path, "() => [textOf('#list [aria-current=true] small'), texts('#list small')]")
    listed = ["train · step 4 · shop · 3 turns", "train · step 4 · shop · 2 turns",
              "train · step 3 · shop · 3 turns · screenshots", "train · step 3 · shop · 2 turns · screenshots"]
    assert seen == [listed[2], listed]


def test_an_old_episode_is_listed_when_a_fragment_opens_it(look_at, tmp_path):
    path = write_group(tmp_path / "run", steps=range(200))
    seen, _, _ = look_at(path, "() => textOf('#list [aria-current=true] small')", "#step=0&task=17")
    assert "step 0" in seen


@pytest.mark.parametrize("keys, turn, did", [
    ([], 1, SEARCHED), (["ArrowRight"], 2, "Click “red <lamp>”"), (["ArrowLeft"], 1, SEARCHED),
    (["ArrowRight"] * 5, 3, "no action could be read"), (["j", "ArrowRight"], 2, "exit “$3”"),
    (["ArrowRight", "ArrowRight", "ArrowLeft"], 2, "Click “red <lamp>”"), (["j", "ArrowRight", "k"], 1, SEARCHED)])
def test_keys_go_through_turns_and_episodes(keys, turn, did, look_at, tmp_path):
    seen, complaints, _ = look_at(write_group(tmp_path / "run"), SHOWN, keys=keys)
    assert seen[0].startswith(f"Turn {turn} of") and seen[1] == did and complaints == []
    assert (f"turn={turn}" in seen[2]) == bool(keys)  # the address can be copied


def test_slider_buttons_and_thumbnails_go_to_a_turn(look_at, tmp_path):
    seen, complaints, _ = look_at(write_group(tmp_path / "run"), """() => {
        const now = () => textOf('#turn'), slider = node('#slider'), out = [];
        slider.value = 3; slider.dispatchEvent(new Event('input')); out.push(now());
        node('.turns button').click(); out.push(now(), slider.value);
        nodes('#strip button')[0].click(); out.push(now(), slider.value);
        return [...out, nodes('#strip img').length, node('.turns button').disabled];
    }""")
    assert seen == ["Turn 3 of 3", "Turn 2 of 3", "2", "Turn 1 of 3", "1", 2, True] and complaints == []


def test_typing_into_the_search_field_moves_nothing(look_at, tmp_path):
    seen, _, _ = look_at(write_group(tmp_path / "run"), "() => [document.activeElement.id, textOf('#turn')]",
                         keys=["Tab", "g", "j", "ArrowRight"])
    assert seen == ["text", "Turn 1 of 3"]


def test_tokens_take_the_advantages_colour_and_more_of_it_the_less_probable_they_were(look_at, tmp_path):
    seen, _, _ = look_at(write_group(tmp_path / "run"), """() => {
        const tokens = () => nodes('.said span').map(t => [t.className, t.style.getPropertyValue('--p')]);
        return [tokens()[1], tokens()[3], (nodes('.members button')[0].click(), tokens()[1])];
    }""")
    assert seen == [["down", "0.44"], ["down tag", "0.00"], ["up", "0.44"]]  # 0.7 times 1 - 1/e


def test_a_group_stands_side_by_side_with_rewards_and_where_its_members_part(look_at, tmp_path):
    seen, complaints, _ = look_at(write_group(tmp_path / "run"), """() => {
        const out = [texts('.side thead th'), texts('.side tbody tr'), nodes('.side img').length];
        nodes('.side tbody button')[3].click();
        return [...out, textOf('#turn'), textOf('.intent'), !node('.side')];
    }""", keys=["g"])
    heads, rows, pictures, turn, _, closed = seen
    assert heads == ["", "member 0 reward 1+0.70", "member 1 ◂reward 0.25−0.70"]
    assert rows == ["1" + SEARCHED * 2, "from here on they differ", "2exit “$3”Click “red <lamp>”",
                    "3no action could be readno action found", "answer “$3”never exited✗ exact_match “$3”"]
    assert (pictures, turn, closed, complaints) == (4, "Turn 2 of 3", True, [])


def test_hostile_text_is_inert_in_the_player_and_in_the_group(look_at, tmp_path):
    path = write_group(tmp_path / "run", hostile=HOSTILE)
    rows = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    for row in rows:
        row |= dict.fromkeys(("answer", "intent", "split", "task_id"), HOSTILE)
        row |= {"checks": [[HOSTILE, False, HOSTILE]]}
        for turn in row["turns"]:
            turn |= {"observation": f"<a>{HOSTILE} <15></a>", "url": HOSTILE,
                     "action": f"do(action='{HOSTILE}', argument=\"x\", element='15')"}
            turn["shot"]["frame"] = [640, "1;background:url(http://127.0.0.1:1/x)", None, 5]
    (tmp_path / "run/trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = {"template": HOSTILE, "success_rate": .5, "ci95": [.2, .8], "n": 4}
    summary = {"success_rate": .5, "ci95": [.2, .8], "n": 4, "per_template": {HOSTILE: template}}
    (tmp_path / "run/summary.json").write_text(json.dumps({"splits": {HOSTILE: summary}, "run": {"model": HOSTILE}}))
    inside = """() => [document.title, document.scripts.length,
                       nodes('img').every(image => image.src.startsWith('data:image/jpeg'))]"""
    for keys in (["ArrowRight"], ["g"], ["g", "g"]):
        (title, scripts, ours), complaints, asked = look_at(report(path.parent), inside, keys=keys)
        assert (title, scripts, ours, complaints, len(asked)) == ("run", 2, True, [], 1)


def test_compared_runs_stand_in_one_picture_template_by_template(look_at, tmp_path, capsys):
    for name, share in (("base", 0.0), ("bc", 0.25), ("r1", 0.75)):
        figures = {"success_rate": share, "ci95": [share / 2, share / 2 + .5], "n": 4, "turns": 2.0, "env_errors": 0}
        templates = {"3": figures | {"template": "open {{name}}"},
                     "4": figures | {"template": "buy {{name}}", "success_rate": 1 - share}}
        (tmp_path / name).mkdir()
        splits = {"test": figures | {"per_template": templates}}
        (tmp_path / name / "summary.json").write_text(json.dumps({"splits": splits}))
    evaluate.main(Config(compare=",".join(str(tmp_path / name) for name in ("base", "bc", "r1"))))
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"report: {tmp_path}/r1/report.html (") and said[-1].endswith(" MB)")
    seen, complaints, _ = look_at(tmp_path / "r1/report.html", """() => [
        texts('.legend span'), node('.bars').parentElement.open,
        texts('.bars > div'),
        nodes('.bar').slice(0, 3).map(n => [n.querySelector('b').style.width, n.querySelector('u').style.left])]""")
    assert seen == [["base", "bc", "r1"], True, ["open ‹name›0%25%75%", "buy ‹name›100%75%25%"],
                    [["0%", "0%"], ["25%", "12.5%"], ["75%", "37.5%"]]] and complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_window(width, run, tmp_path):
    path = write_group(tmp_path / "run")

    async def look():
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page(viewport={"width": width, "height": 844})
            await page.goto(path.absolute().as_uri())
            wide = [await page.evaluate("document.documentElement.scrollWidth")]
            await page.keyboard.press("g")
            return wide + [await page.evaluate("document.documentElement.scrollWidth")]
    assert max(run(look())) <= width


def test_a_report_with_2000_episodes_and_200_pictures_opens_within_two_seconds(run, tmp_path):
    write_group(tmp_path / "run", steps=range(1000))
    rows = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    for k, turn in enumerate(turn for row in reversed(rows) for turn in row["turns"]):
        turn["observation"] = PAGE + "\n<a>a link with a name <16></a> and a text" * 40
        turn["shot"]["file"] = f"screenshots/big-{k}.jpg"
        if k < 200:
            (tmp_path / "run" / turn["shot"]["file"]).write_bytes(JPEG + os.urandom(25_000))
    (tmp_path / "run/trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
            metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
            return took, {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]
    took, computed = run(look())
    print(f"{path.stat().st_size / 1e6:.1f} MB opened in {took:.2f} s, of which it computed {computed:.2f}")
    assert computed < 2


# ----------------------------------------------------------------------------------------------- pictures

RED = "background:rgb(255,0,0);border:0;display:inline-block;color:rgb(255,0,0)"
FAR = "<div style='height:3000px'>a long page</div>"
BUTTON = f"<button style='{RED};width:140px;height:50px' onclick='top.at = [event.clientX, event.clientY]'>go</button>"
INNER = f"<body style='margin:0'>{FAR}<div style='padding:200px'>{BUTTON}</div>{FAR}"
PAGES = {
    "/inner": INNER, "/plain": "<body>" + BUTTON,
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
REDS = """async jpeg => {  // the box of the red pixels in a picture
    const image = new Image();
    image.src = 'data:image/jpeg;base64,' + jpeg;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height), paint = canvas.getContext('2d');
    paint.drawImage(image, 0, 0);
    const {data} = paint.getImageData(0, 0, image.width, image.height), xs = [], ys = [];
    for (let i = 0; i < data.length; i += 4) if (data[i] > 200 && data[i + 1] < 60 && data[i + 2] < 60) {
        xs.push(i / 4 % image.width);
        ys.push(Math.floor(i / 4 / image.width));
    }
    const low = v => v.reduce((a, b) => Math.min(a, b)), high = v => v.reduce((a, b) => Math.max(a, b)) + 1;
    return [low(xs), low(ys), high(xs) - low(xs), high(ys) - low(ys), image.width, image.height];
}"""


@pytest.mark.parametrize("path, action", [
    ("/field", "Type"), ("/choice", "Select Dropdown Option"),
    *((path, "Click") for path in PAGES if path not in ("/inner", "/field", "/choice"))])
def test_the_frame_lies_on_the_element_that_is_acted_upon(path, action, site, browse, tmp_path):
    """Compared with the pixels of the picture, and with where the click arrives."""
    argument = ', argument="b"' if action != "Click" else ""
    turn = Turn("", "", [], [], [], f'do(action="{action}"{argument}, element="0")')
    trajectory = Trajectory(make_task(), turns=[turn])

    async def look(session):
        await session.observe()
        env = Environment({}, tmp_path, SiteSettings(screenshots=1))
        env.reset([trajectory.task], name="here")
        await env.watch(session, trajectory)
        await execute(session, turn.response)
        clicked = await session.page.evaluate("window.at")
        jpeg = base64.b64encode((tmp_path / turn.shot["file"]).read_bytes()).decode()
        blank = await session.browser_context.new_page()
        *red, width, height = await blank.evaluate(REDS, jpeg)
        assert (width, height) == (1280, 720) and turn.shot["file"] == "screenshots/here-7-0-1.jpg"
        assert red == pytest.approx(turn.shot["frame"], abs=2.5), (red, turn.shot["frame"])
        if path in ("/plain", "/far", "/panel"):  # here the click's own numbers are the window's
            left, top, w, h = turn.shot["frame"]
            assert clicked == pytest.approx([left + w / 2, top + h / 2], abs=1)
        assert action != "Click" or clicked
    browse(look, site(PAGES) + path)


def played(run, chat, tasks, settings, texts, group=1, env=None):
    """Their episodes, played by a script. env: what watches; a success is certain."""
    side = Env()
    if env is not None:
        side.watch = env.watch
        side.visible = env.visible
    return run(play(scripted(chat, texts), chat, tasks, side, settings, group=group))


def test_the_first_episodes_keep_a_picture_of_every_turn_and_the_others_none(run, chat, site, tmp_path):
    tasks = [task_at(site(PAGES) + "/far", task_id=f"a/{i}") for i in range(2)]
    env = Environment({}, tmp_path, SiteSettings(screenshots=3))
    env.reset(tasks, group=2, name="x" * 300 + "sandbox:test")
    texts = [CLICK_GO, "nothing that can be read", 'exit(message="x")']
    episodes = played(run, chat, tasks, Settings(max_context=600, max_new_tokens=60), texts, group=2, env=env)
    records = [tau.to_json(chat) for tau in episodes]
    assert [[("shot" in turn) for turn in record["turns"]] for record in records] == [[True] * 3] * 3 + [[False] * 3]
    files = sorted(file.name for file in (tmp_path / "screenshots").iterdir())
    assert len(files) == 9 and files[0].endswith("xsandbox-test-a-0-0-1.jpg")
    shots = [turn["shot"] for turn in records[0]["turns"]]
    assert [shot["frame"] is not None for shot in shots] == [True, False, False]
    embed(records, tmp_path)
    assert base64.b64decode(shots[0]["jpeg"])[:3] == b"\xff\xd8\xff"


def test_pictures_of_two_sources_with_equal_ids_are_two_files(run, chat, site, tmp_path):
    tasks = [task_at(site(PAGES) + "/plain"), task_at(site(PAGES) + "/far", source=1)]
    env = Environment({}, tmp_path, SiteSettings(screenshots=2))
    env.reset(tasks, name="0/4")
    episodes = played(run, chat, tasks, Settings(max_context=600, max_new_tokens=60), ['exit(message="x")'], env=env)
    files = [tau.turns[0].shot["file"] for tau in episodes]
    assert files == ["screenshots/0-4-0-0-1.jpg", "screenshots/0-4-1-0-0-1.jpg"]
    plain, far = ((tmp_path / file).read_bytes() for file in files)
    assert plain != far


def test_nobody_looks_on_when_it_is_off(run, chat, site, tmp_path, monkeypatch):
    """What training pays then: one look-up a turn. No file, no message to the page."""
    tasks = [task_at(site(PAGES) + "/far")]
    env = Environment({}, tmp_path, SiteSettings())
    env.reset(tasks, group=8, name="train")
    monkeypatch.setattr(evaluate, "aim", None)
    settings = Settings(max_context=600, max_new_tokens=60)
    tau, = played(run, chat, tasks, settings, [CLICK_GO, 'exit(message="x")'], env=env)
    assert tau.status == "ok" and "shot" not in tau.to_json(chat)["turns"][0] and not list(tmp_path.iterdir())


BOX = {"x": 1, "y": 2, "width": 3, "height": 4}


@pytest.mark.parametrize("spot", ["no object", None, {"x": 1, "y": 2}, BOX | {"y": "2"}, BOX | {"x": float("nan")},
                                  BOX | {"x": 1e99}])
def test_whatever_a_page_says_about_itself_a_picture_has_a_frame_or_none(spot):
    assert onlooker.frame_of(spot) is None and onlooker.frame_of(BOX) == [-0.5, 0, 3, 4]


def test_a_page_in_an_endless_loop_gets_no_picture_and_its_episode_goes_on(run, chat, site, tmp_path):
    hang = "<body><button onclick='setTimeout(() => { for (;;); }, 0)'>go</button>"
    tasks = [task_at(site({"/": hang}) + "/")]
    settings = Settings(max_context=600, max_new_tokens=60, timeout=1)
    env = Environment({}, tmp_path, SiteSettings(screenshots=1))
    env.reset(tasks, name="t")
    tau, = played(run, chat, tasks, settings, [CLICK_GO, 'exit(message="x")'], env=env)
    assert tau.turns[0].shot and tau.status == "env_error"  # as without pictures: the page cannot be read any more


# --------------------------------------------------------------------------------------------- a window


def test_a_machine_without_a_display_is_told_so_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ValueError, match="--watch opens a window, but this machine has no display .*--screenshots 8"):
        Environment({}, tmp_path, SiteSettings(), visible=True)


def test_a_window_needs_a_chromium_that_has_windows(tmp_path, monkeypatch):
    for name in ("chromium-headless-shell", "chromium"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = tmp_path / "cache"
    playwright = type("P", (), {"chromium": type("C", (), {"executable_path": f"{cache}/chromium-12/linux/chrome"})})
    assert find_chromium(playwright) == f"{tmp_path}/chromium-headless-shell"
    assert find_chromium(playwright, visible=True) == f"{tmp_path}/chromium"
    shell = cache / "chromium_headless_shell-12" / "linux" / "chrome-headless-shell"  # what --only-shell downloads
    shell.parent.mkdir(parents=True)
    shell.touch()
    assert find_chromium(playwright) == str(shell)
    assert find_chromium(playwright, visible=True) == f"{tmp_path}/chromium"


def test_whoever_watches_reads_thought_and_action_and_sees_the_element(run, chat, site, monkeypatch, capsys):
    """Without a window: what is printed, and the frame that Chromium is asked to draw above the page."""
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(onlooker, "PACE", 0.01)
    sent, real = [], Session._adopt

    async def adopt(session, page):
        await real(session, page)
        send = session.devtools[page].send
        session.devtools[page].send = lambda name, given=None: (sent.append((name, given)), send(name, given))[1]

    monkeypatch.setattr(Session, "_adopt", adopt)
    tasks = [task_at(site(PAGES) + "/plain", intent="press go")]
    env = Environment({}, "", SiteSettings(), visible=True)
    texts = [CLICK_GO, '<think>\x1b[2Jdone</think><answer>exit(message="x")</answer>']
    tau, = played(run, chat, tasks, Settings(max_context=600, max_new_tokens=60), texts, env=env)
    assert tau.status == "ok"
    said = capsys.readouterr().out
    places = [said.index(part) for part in ("== press go", "-- turn 1: http", "hm\n   do(action", "-- turn 2")]
    assert places == sorted(places) and "\x1b" not in said
    drawn = [given for name, given in sent if name == "Overlay.highlightRect"]
    assert len(drawn) == 1 and (drawn[0]["width"], drawn[0]["height"]) == (140, 50)


# ----------------------------------------------------------------------------------- the pictures of the README


def test_the_picture_of_an_episode_shows_what_was_read_thought_and_done(tmp_path):
    """Of the successes in three or four turns; the element that the action names is marked in the page's text."""
    write_group(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/trajectories.jsonl").read_text().splitlines()]
    with pytest.raises(SystemExit, match="no picture shows a success"):
        pictures.choose(rows)
    search, exits = rows[0]["turns"]
    search["shot"]["frame"] = [10, 700, 100, 60]
    click = search | {"action": CLICK, "url": "http://h/2"}
    wasteful = rows[0] | {"turns": [search, search, click, exits]}
    good = rows[0] | {"turns": [search, click, exits], "intent": "find <b>"}
    assert pictures.choose([*rows, wasteful, good]) is good
    html = pictures.agent_html(good, tmp_path / "run")
    assert html.count("<section>") == 3 and "find &lt;b&gt;" in html and html.count("<dd>hm</dd>") == 3
    assert "<mark>&lt;input&gt;search &lt;5&gt; = tea&lt;/input&gt;</mark>" in html
    assert "<mark>&lt;a&gt;red &amp;lt;lamp&amp;gt; &lt;15&gt;&lt;/a&gt;</mark>" in html


@pytest.mark.parametrize("name", ["agent", "agent-dark", "report", "report-dark", "packing"])
def test_a_picture_of_the_readme_is_small(name):
    file = next((ROOT / "assets").glob(f"{name}.[ps][nv]g"))
    assert file.stat().st_size < 300_000
