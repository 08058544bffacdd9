"""One task from the command line: played by a policy, or shown by a person and replayed."""
import asyncio
import html
import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields

import pytest
from conftest import ROOT, Env, answer, task_at

import bc
import model
import one_task
import worlds
from one_task import Config, Step, find, news, possible_checks, step_of, without_port
from worlds import onlooker, recorder
from worlds.browser import Browser, EnvError, Session
from worlds.recorder import Person, Wish

# A site with a state: a city and a size. Its page counts what it hears of its field.
SITE = '''
import http.server, sys, urllib.parse
state = {"city": "rome", "size": "small", "news": ""}
HOME = "<title>home</title> <a href=/settings>settings</a> <a href=/about>about</a>"
ABOUT = "<title>about</title> founded in 1912"
FORM = """<title>settings</title><a href=/settings>settings</a><form method=post><input name=city
aria-label=city value="%(city)s" oninput="heard.textContent++">
<select name=size aria-label=size><option>small<option>large</select><button>save</button></form>
<label><input type=checkbox id=news %(news)s onchange="location = '/settings?news=' + this.checked">news</label>
<p id=heard>0</p><p>lives in %(city)s and wears %(size)s"""

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if "news=true" in self.path:
            state["news"] = "checked"
        elif "news=" in self.path:
            state["news"] = ""
        pages = {"/settings": FORM % state, "/about": ABOUT}
        path = self.path.split("?")[0]
        page = pages.get(path, HOME)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length).decode()
        state.update(urllib.parse.parse_qsl(body))
        self.do_GET()

    def log_message(self, *_):
        pass

port = int(sys.argv[1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''

PAGE = """<title>shop</title><style>nav div {display: none} nav:hover div {display: block}</style>
<nav><a href="#menu">menu</a><div><a href="#lamps">lamps</a></div></nav>
<input aria-label=city value=rome oninput="heard.textContent++"> <select
aria-label=size><option>small<option>large</select>
<button onclick="said.textContent = 'saved'">save</button><p id=heard>0</p><p id=said>not yet</p>
<p id=plain>words only</p><div style="height: 3000px"></div>"""


# ------------------------------------------------------------------------- a person becomes an agent


TWO = "<title>two</title><button onclick='document.title = 3' style='width: 150px; height: 40px'>more</button>"


def shown(run, site, page, *doings):
    """What a person asks for: doings act with a real mouse and keyboard -> (steps, text of the last page, messages).

    A doing is a motion, and the number of wishes that it makes.
    """
    async def test():
        async with Browser(one_task.Config(), None) as browser:
            address = site({"/": page, "/two": TWO})
            session = await browser.open({"start_url": address, "script": recorder.SCRIPT})
            said = []
            wishes = []
            person = Person(session, say=said.append)
            for motion, expected in doings:
                for _ in range(expected):
                    _, text = await session.observe()
                    next_wish = asyncio.wait_for(person.next(), 60)
                    wish, _ = await asyncio.gather(next_wish, motion(session.page))
                    wishes.append((wish, text))
                    if wish:
                        await carry_out(session, wish)
                    motion = rest  # the wishes that are left come from the same motion
            _, text = await session.observe()
            await session.close()
            steps = [step_of(wish, read) for wish, read in wishes]
            return steps, text, said
    return run(test())


async def carry_out(session, wish):
    element = None
    if wish.element is not None:
        element = str(wish.element)
    call = one_task.Call(wish.name, wish.argument, element)
    action = one_task.ACTIONS[wish.name]
    await session.execute(wish.name, action.method, *call.method_args())


@pytest.fixture
def patient(monkeypatch):
    """The recorder does not take a pause of a busy machine for the end of a text."""
    script = recorder.SCRIPT.replace("IDLE = 1500", "IDLE = 60000")
    assert script != recorder.SCRIPT
    monkeypatch.setattr(recorder, "SCRIPT", script)


def thoughts(steps):
    return [step.thought() for step in steps]


async def rest(page):
    """The last motion asked for two things."""


async def middle(locator):
    box = await locator.bounding_box()
    x = box["x"] + box["width"] / 2
    y = box["y"] + box["height"] / 2
    return x, y


async def listening(page):
    """Until the recorder listens. What a person does before that is held back and lost."""
    async def wait():
        while not await page.evaluate("window[Symbol.for('recorder')].state === 'listen'"):
            await asyncio.sleep(0.01)
    await asyncio.wait_for(wait(), 60)


async def press(page, selector):
    await listening(page)
    x, y = await middle(page.locator(selector).first)
    await page.mouse.click(x, y)


def presses(selector):
    """The motion of a click."""
    async def motion(page):
        await press(page, selector)
    return motion


async def type_oslo(page):
    await press(page, "input")
    await page.keyboard.press("Control+A")
    await page.keyboard.type("oslo")


async def type_and_save(page):
    await type_oslo(page)
    await press(page, "button")


OSLO = Step("Type", "oslo", "input", "city", 0)
SAVE = Step("Click", None, "button", "save", 0)


def test_a_click_is_held_back_and_carried_out_by_the_agent(run, site):
    steps, text, _ = shown(run, site, PAGE, (presses("button"), 1))
    assert steps == [SAVE]
    assert "saved" in text


def test_a_document_that_is_opened_anew_is_listened_to(run, site):
    """document.open() takes all listeners from its window."""
    page = f"<script>onload = () => {{ document.open(); document.write(`{PAGE}`); document.close(); }}</script>"
    steps, text, _ = shown(run, site, page, (presses("button"), 1))
    assert steps == [SAVE]
    assert "saved" in text


def test_escape_closes_no_dialog(run, site):
    """No agent can press it, so in the replay the dialog would stay open."""
    async def escape_and_press(page):
        await listening(page)
        await page.keyboard.press("Escape")
        await press(page, "dialog button")

    page = """<dialog id=box><button onclick="document.title = box.open">save</button></dialog><script>box.showModal()</script>"""
    steps, text, _ = shown(run, site, page, (escape_and_press, 1))
    assert steps == [SAVE]
    assert "title: true" in text


def test_a_text_is_typed_once_and_before_the_click_that_ends_it(run, site, patient):
    steps, text, _ = shown(run, site, PAGE, (type_and_save, 2))
    assert steps == [OSLO, SAVE]
    assert "= oslo</input>" in text
    assert "saved" in text
    assert "\n1\n" in text  # the page heard of it once, when the agent typed it


def test_a_click_into_the_field_that_is_typed_into_only_moves_the_cursor(run, site):
    async def type_with_a_click_between(page):
        await press(page, "input")
        await page.keyboard.press("Control+A")
        await page.keyboard.type("slo")
        await press(page, "input")
        await page.keyboard.press("Home")
        await page.keyboard.type("o")

    async def go_on(page):
        await press(page, "input")
        await page.keyboard.press("End")
        await page.keyboard.type("!")

    steps, text, _ = shown(run, site, PAGE, (type_with_a_click_between, 1), (go_on, 1))
    assert thoughts(steps) == ["type oslo into city", "type oslo! into city"]
    assert "\n2\n" in text  # the page heard of each once


TWO_FIELDS = """<title>form</title><input aria-label=user><input aria-label=password onfocus="met.textContent = 'met'">
<button>go</button><p id=met>new</p>"""


@pytest.mark.parametrize("key_pause", [0, 80])
def test_a_person_may_type_on_while_the_agent_types_what_was_before(run, site, key_pause):
    async def fill_both(page):
        await press(page, "input >> nth=0")
        await page.keyboard.type("bob")
        await press(page, "input >> nth=1")
        await page.keyboard.type("secret and more", delay=key_pause)

    steps, text, _ = shown(run, site, TWO_FIELDS, (fill_both, 2))
    assert thoughts(steps) == ["type bob into user", "type secret and more into password"]
    assert "= bob</input>" in text
    assert "= secret and more</input>" in text


def test_a_click_is_held_back_in_a_frame_whose_window_was_used_early(run, site):
    """Chromium forgets recorder.js's listeners there; init.js reminds it."""
    async def press_in_frame(page):
        await listening(page)
        await page.mouse.click(60, 20)

    page = "<style>* {margin: 0; border: 0}</style><iframe src=/two></iframe><script>frames[0].used = 1</script>"
    steps, *_ = shown(run, site, page, (press_in_frame, 1))
    assert thoughts(steps) == ["click more"]


def test_a_text_in_a_frame_ends_with_a_click_on_the_page_around_it(run, site, patient):
    page = "<button>save</button><iframe srcdoc='<input aria-label=city>'></iframe>"

    async def type_and_click(page):
        await listening(page)
        frame = page.frames[1]
        x, y = await middle(frame.locator("input"))
        await page.mouse.click(x, y)
        await page.keyboard.type("oslo")
        await press(page, "button")

    steps, *_ = shown(run, site, page, (type_and_click, 2))
    assert thoughts(steps) == ["type oslo into city", "click save"]


def test_a_pause_and_enter_end_a_text_as_well(run, site):
    async def enter(page):
        await type_oslo(page)
        await page.keyboard.press("Enter")

    steps, *_ = shown(run, site, PAGE, (type_oslo, 1))
    assert steps == [OSLO]
    steps, *_ = shown(run, site, PAGE, (enter, 1))
    assert steps == [Step("Search", "oslo", "input", "city", 0)]


def test_a_dropdown_is_chosen_from_by_the_agent(run, site):
    async def choose(page):
        await listening(page)
        await page.locator("select").focus()
        await page.keyboard.press("ArrowDown")

    steps, text, _ = shown(run, site, PAGE, (choose, 1))
    assert steps == [Step("Select Dropdown Option", "large", "select", "size", 0)]
    assert "<select>size <2> = large (" in text


@pytest.mark.parametrize("keys, name, argument", [
    ("PageDown", "Scroll Down", None),
    ("PageUp", "Scroll Up", None),
    ("Alt+0", "Switch Tab", "0"),
    ("Enter", "Press Enter", None),
])
def test_keys_that_stand_for_actions(run, site, keys, name, argument):
    async def do(page):
        await listening(page)
        await page.keyboard.press(keys)

    steps, *_ = shown(run, site, PAGE, (do, 1))
    assert steps == [Step(name, argument, "", "", 0)]


def test_a_menu_under_the_mouse_is_opened_first(run, site):
    async def open_menu(page):
        await listening(page)
        await page.mouse.move(20, 20)
        await press(page, "nav div a")

    steps, *_ = shown(run, site, PAGE, (open_menu, 2))
    assert thoughts(steps) == ["hover over menu", "click lamps"]


def test_what_an_agent_cannot_see_is_not_done(run, site):
    async def words_then_button(page):
        await press(page, "#plain")
        await press(page, "button")

    steps, _, said = shown(run, site, PAGE, (words_then_button, 1))
    assert [step.name for step in steps] == ["save"]
    assert "nothing was done" in said[0]


def test_the_windows_back_button_becomes_an_action(run, site):
    page = '<title>one</title><a href="/two">two</a>'

    async def back(page):
        await listening(page)
        await page.go_back()

    steps, text, _ = shown(run, site, page, (presses("a"), 1), (back, 1))
    assert [step.action for step in steps] == ["Click", "Go Backward"]
    assert "title: one" in text


OPENS_A_TAB = """<title>one</title><a href="/two" target=_blank>two</a>
<button onclick="said.textContent = 'saved'">save</button><p id=said>not yet</p>"""


async def to_first_tab(page):
    await listening(page)
    await page.keyboard.press("Alt+0")


async def close_tab(page):
    await listening(page)
    await page.close()


async def press_in_first_tab(page):
    """By the window's strip of tabs, of which no page hears."""
    first = page.context.pages[0]
    await press(first, "button")


@pytest.mark.parametrize("back", [
    [(to_first_tab, 1), (presses("button"), 1)],
    [(close_tab, 1), (presses("button"), 1)],
    [(press_in_first_tab, 2)],
])
def test_a_person_goes_to_a_new_tab_and_back(run, site, back):
    steps, text, _ = shown(run, site, OPENS_A_TAB, (presses("a"), 1), (presses("button"), 1), *back)
    assert thoughts(steps) == ["click two", "click more", "go to tab 0", "click save"]
    assert "title: one" in text
    assert "saved" in text


def test_a_tab_that_opens_by_itself_is_gone_to(run, site):
    page = "<title>one</title><script>setTimeout(() => open('/two'), 1000)</script>"
    steps, text, _ = shown(run, site, page, (rest, 1), (presses("button"), 1))
    assert thoughts(steps) == ["go to tab 1", "click more"]


def test_a_tab_that_was_left_holds_back_what_is_done_in_it(run, site):
    async def test():
        async with Browser(one_task.Config(), None) as browser:
            address = site({"/": PAGE})
            session = await browser.open({"start_url": address, "script": recorder.SCRIPT})
            await session.browser_context.new_page()
            first = session.browser_context.pages[0]
            await session.execute("Switch Tab", Session.switch_tab, "0")
            Person(session)
            await session.execute("Switch Tab", Session.switch_tab, "1")
            x, y = await middle(first.locator("button").first)
            await first.mouse.click(x, y)
            return await first.inner_text("#said")
    assert run(test()) == "not yet"


def test_a_closed_window_is_the_end(run, site):
    async def test():
        async with Browser(one_task.Config(), None) as browser:
            address = site({"/": PAGE})
            session = await browser.open({"start_url": address, "script": recorder.SCRIPT})
            person = Person(session)
            await session.observe()
            asyncio.ensure_future(close(session.page))
            return await asyncio.wait_for(person.next(), 60)
    assert run(test()) is None


async def close(page):
    await asyncio.sleep(0.2)
    await page.context.close()


@pytest.fixture
def watched(monkeypatch):
    """watched(motions): what `watch_person` opens gets a scripted hand, and no window."""
    listen = Person.listen

    def watched(motions):
        left = iter(motions)

        async def listen_to_hand(person):
            motion = next(left)
            told, _ = await asyncio.gather(listen(person), motion(person.session.page))
            return told

        def windowless(cfg, sites, visible):
            return Browser(cfg, sites)

        monkeypatch.setattr(Person, "listen", listen_to_hand)
        monkeypatch.setattr(one_task, "Browser", windowless)
    return watched


@pytest.mark.parametrize("reading, steps, address", [
    (1, [], "/"),
    (2, ["click two"], "/two"),
])
def test_a_window_may_be_closed_while_a_page_is_read(run, site, watched, monkeypatch, reading, steps, address):
    observe = Session.observe
    numbers = itertools.count(1)

    async def observe_and_close(session):
        if next(numbers) == reading:
            await session.page.evaluate("void fetch('/slow')")  # observe waits for it
            asyncio.ensure_future(close(session.page))
        return await observe(session)

    def slow(request):
        time.sleep(2)

    monkeypatch.setattr(Session, "observe", observe_and_close)
    watched([presses("a")])
    url = site({"/": '<a href="/two">two</a>', "/two": "two", "/slow": slow})
    done, last = run(one_task.watch_person(task_at(url + "/"), Env(), Config()))
    assert thoughts(done) == steps
    assert last == url + address


def test_a_window_may_be_closed_with_several_tabs(run, site, watched):
    async def close_each(page):
        await listening(page)
        closing = [tab.close() for tab in page.context.pages]
        await asyncio.gather(*closing)

    watched([presses("a"), close_each])
    url = site({"/": OPENS_A_TAB, "/two": "two"})
    steps, last = run(one_task.watch_person(task_at(url), Env(), Config()))
    assert thoughts(steps) == ["click two"]
    assert last == url + "/two"


# -------------------------------------------------------------------------------- steps and checks


def test_a_step_is_told_by_name_and_found_again_under_another_id():
    page = "<a>edit <0></a> lamp <a>edit <1></a>\n<input>city <2> = rome</input>"
    step = step_of(Wish("Click", None, 1), page)
    assert step == Step("Click", None, "a", "edit", 1)
    assert find(step, "<button>new <0></button> <a>edit <1></a> <a>edit <7></a>") == "7"
    assert find(step, "<a>edit <1></a>") is None


def test_news_are_lines_that_only_the_second_text_has():
    before = ["a lamp"]
    after = ["a lamp", "saved at 12:30", "all is well", "ok", "more", "most"]
    assert news(before, after, ["oslo"]) == ["all is well", "more"]

    before = ["a lamp", "rome"]
    after = ["a lamp", "saved at 12:30", "all is well", "oslo is your city", "ok", "more"]
    assert news(before, after, ["oslo"]) == ["oslo is your city"]

    after = ["oslo at 14:30, ordered at 16:05", f"oslo at 14:30 {'and so on ' * 20}", "b", "gate b"]
    assert news([], after, ["oslo", "14:30"]) == [after[1]]
    assert news([], after, ["b"]) == ["b", "gate b"]


SPELLED = "document.querySelector('#spell').checked"
ABOUT = "http://x/about"


class Look:
    """What one_task.Snapshot has seen of a site."""
    address = "http://x/settings"

    def __init__(self, state, url="http://x/", shown=(), checked="false"):
        self.state = state
        self.url = url
        self.shown = list(shown)
        self.settings = {SPELLED: checked}


SPELL = {
    "url": Look.address,
    "locator": SPELLED,
    "required_contents": {"exact_match": "true"},
}


@pytest.mark.parametrize("after, answer, kinds", [
    (Look(["oslo"]), "", [["program_html"]]),
    (Look(["oslo"]), "12", [["string_match", "program_html"], ["string_match"]]),
    (Look(["rome"], checked="true"), "", [["program_html"]]),
    (Look(["rome"], ABOUT, ["founded"]), "", [["url_match"], ["program_html"]]),
    (Look(["rome"], ABOUT), "12", [["string_match"]]),
    (Look(["rome"]), "", []),
    (Look([]), "", [["program_html"]]),
])
def test_the_check_follows_from_what_was_done(after, answer, kinds):
    nothing = Look(["rome"])
    possible = possible_checks(nothing, after, answer, [])
    assert [check["eval_types"] for check in possible] == kinds
    if after.settings != nothing.settings:
        assert possible[0]["program_html"] == [SPELL]
    if not after.state:  # what is gone
        [target] = possible[0]["program_html"]
        assert target["required_contents"] == {"must_exclude": ["rome"]}


# --------------------------------------------------------------------------- recorded, from end to end


open_settings = presses("a[href='/settings']")
LIVE_IN_OSLO = [open_settings, type_and_save, rest, close]
require_display = onlooker.require_display


@pytest.fixture
def recorded(tmp_path, monkeypatch, watched, patient, checkpoint, capsys):
    """recorded(task, motions, answer): records with a scripted hand -> what was printed."""
    def need_no_display(*_):
        pass

    (tmp_path / "site.py").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onlooker, "require_display", need_no_display)

    def said():
        return capsys.readouterr().out

    def record(task, motions, answer="", page=None, **flags):
        """page: what stands on the settings instead of the sentence."""
        def give_answer(question):
            return answer

        if page:
            (tmp_path / "site.py").write_text(SITE.replace("lives in %(city)s and wears %(size)s", page))

        watched(motions)
        monkeypatch.setattr("builtins.input", give_answer)
        settings = {
            "url": "http://127.0.0.1:{port}/",
            "task": task,
            "record": "demos/a.jsonl",
            "serve": f"{sys.executable} site.py {{port}}",
            "timeout": 60,
            "model": str(checkpoint),
            "max_context": 4000,
            "max_new_tokens": 100,
        }
        settings.update(flags)
        one_task.main(Config(**settings))
        return said()
    record.said = said
    return record


def test_the_port_of_another_server_stays_in_an_address():
    served = {"serve": "x {port}", "start_url": "http://127.0.0.1:8001/"}
    url = "http://127.0.0.1:8001/go?to=http://127.0.0.1:80015/"
    assert without_port(url, served) == "http://127.0.0.1:{port}/go?to=http://127.0.0.1:80015/"


def kept_tasks(path):
    return json.loads((path / "demos/a.tasks.json").read_text())


def thought_of(response):
    thought, _, _ = response.partition("</think>")
    return thought.removeprefix("<think>").strip()


def test_a_recording_becomes_a_demonstration_and_a_task(recorded, tmp_path, chat):
    out = recorded("live in oslo", LIVE_IN_OSLO)
    assert "type oslo into city" in out
    assert "4 turns, replayed" in out

    [task] = kept_tasks(tmp_path)
    [target] = task["eval"]["program_html"]
    assert target["url"] == "http://127.0.0.1:{port}/settings"
    assert target["required_contents"] == {"must_include": ["lives in oslo and wears small"]}

    [demonstration] = bc.read_demonstrations(tmp_path / "demos/a.jsonl", chat)
    told = [thought_of(turn.response) for turn in demonstration.turns]
    assert told == ["click settings", "type oslo into city", "click save", "all is done"]
    tasks = worlds.load_tasks("demos/a.tasks.json", {})
    assert tasks[0]["intent"] == "live in oslo"


@pytest.mark.parametrize("page, contents", [
    ("<table><tr><td>ann<td>%(city)s<td>small</table>", {"must_include": ["ann oslo small"]}),
    ("lives&nbsp;in <pre>  %(city)s   since  May</pre>", {"must_include": ["oslo since May"]}),
])
def test_a_check_of_text_does_not_ask_for_tabs_and_the_like(page, contents, recorded, tmp_path):
    """Lines were compared with single spaces and checked as the page wrote them, so nothing was recorded."""
    recorded("live in oslo", LIVE_IN_OSLO, page=page)
    [task] = kept_tasks(tmp_path)
    [target] = task["eval"]["program_html"]
    assert target["required_contents"] == contents


def test_what_is_gone_is_checked_where_nothing_new_is_read(recorded, tmp_path):
    gone = "<script>if ('%(news)s') document.querySelector('p:last-of-type').remove()</script>"
    recorded("drop rome", [open_settings, presses("#news"), open_settings, close], page=f"flies to rome{gone}")
    [task] = kept_tasks(tmp_path)
    [target] = task["eval"]["program_html"]
    assert target["required_contents"] == {"must_exclude": ["flies to rome"], "must_include": ["news"]}


def test_what_is_gone_is_not_missed_on_a_page_that_asks_for_a_login():
    before = Look(["", "log out", "your bookings", "2 tools", "saw on monday", "a footer of many words, at 9:43"])
    after = Look(["", "log out", "your bookings", "2 tools", "a footer of many words, at 9:43"])
    [check] = possible_checks(before, after, "", [])
    [target] = check["program_html"]
    contents = target["required_contents"]
    assert contents == {"must_exclude": ["saw on monday"], "must_include": ["your bookings"]}


def test_a_recording_after_a_dropped_one_gets_a_number_of_its_own(recorded, tmp_path):
    folder = tmp_path / "demos"
    folder.mkdir()
    (folder / "a.tasks.json").write_text('[{"task_id": 1}]')  # task 0 has been deleted
    recorded("go to settings", [open_settings, close])
    assert [task["task_id"] for task in kept_tasks(tmp_path)] == [1, 2]


def test_a_recording_beside_tasks_with_numbers_as_texts_gets_another_number(recorded, tmp_path):
    """The loader compares them as texts, and refused the file."""
    folder = tmp_path / "demos"
    folder.mkdir()
    (folder / "a.tasks.json").write_text('[{"task_id": "1"}]')
    recorded("go to settings", [open_settings, close])
    assert [task["task_id"] for task in kept_tasks(tmp_path)] == ["1", 2]


def test_an_answer_is_asked_for_and_checked(recorded, tmp_path):
    recorded("when was it founded?", [presses("a[href='/about']"), close], answer="1912")
    recorded("go to settings", [open_settings, close])
    tasks = kept_tasks(tmp_path)
    assert [task["task_id"] for task in tasks] == [0, 1]
    assert tasks[0]["eval"] == {
        "eval_types": ["string_match"],
        "reference_answers": {"must_include": ["1912"]},
    }
    assert tasks[1]["eval"] == {
        "eval_types": ["url_match"],
        "reference_url": "http://127.0.0.1:{port}/settings",
    }


def test_a_setting_that_no_text_tells_is_checked(recorded, tmp_path):
    recorded("get news", [open_settings, presses("#news"), open_settings, close])
    [task] = kept_tasks(tmp_path)
    [target] = task["eval"]["program_html"]
    assert target["locator"] == 'document.querySelector("#news").checked'
    assert target["required_contents"] == {"exact_match": "true"}


@pytest.mark.parametrize("name", [":r1:", "a.b", "1a", "it's", 'q"\\'])
def test_settings_are_found_whatever_their_ids_are(name, site, run):
    """React's useId writes ":r1:". Its backslash was lost on the way into the locator."""
    quoted = html.escape(name)
    page = f"<input id='{quoted}' value=oslo><form><input name='{quoted}' value=rome></form><input id='' name=''>"

    async def go():
        async with Browser(one_task.Config(), None) as browser:
            session = await browser.open({"start_url": site({"/": page})})
            settings = await session.page.evaluate(one_task.SETTINGS)
            found = {locator: await session.page.evaluate(f"String({locator})") for locator in settings}
            await session.close()
        assert found == settings
        assert {"oslo", "rome"} <= set(found.values())
    run(go())


def test_a_page_that_cannot_be_read_voids_the_episode():
    class Picture:
        url = "http://x/a.svg"

        async def evaluate(self, *_):
            raise LookupError("null")

    with pytest.raises(EnvError, match="a.svg cannot be read"):
        asyncio.run(one_task.read(Picture(), "1"))


def test_a_recording_that_nothing_tells_from_doing_nothing_is_not_kept(recorded, tmp_path):
    with pytest.raises(ValueError, match=r"no check passes.* fields of http://127.0.0.1:\{port\}/; close the window on a"):
        recorded("do nothing", [close])
    assert not (tmp_path / "demos").exists()


def test_what_cannot_be_recorded_is_said_before_a_window_opens(recorded, tmp_path, monkeypatch):
    (tmp_path / "demos").mkdir()
    for text in ("[", "[5]", '[{"intent": "x"}]'):
        (tmp_path / "demos/a.tasks.json").write_text(text)
        with pytest.raises(ValueError, match="a.tasks.json"):
            recorded("live in oslo", [])
    (tmp_path / "demos/a.tasks.json").unlink()
    (tmp_path / "demos/a.jsonl").mkdir()
    with pytest.raises(ValueError, match="a.jsonl is a folder"):
        recorded("live in oslo", [])
    (tmp_path / "demos/a.jsonl").rmdir()
    monkeypatch.setattr(onlooker, "require_display", require_display)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with pytest.raises(ValueError, match="--record opens a window, but this machine has no display"):
        recorded("live in oslo", [])


def test_pages_that_do_not_fit_are_the_reason(recorded):
    with pytest.raises(ValueError, match="do not fit into --max-context 260"):
        recorded("live in oslo", LIVE_IN_OSLO, max_context=260)


def test_a_site_that_is_not_started_afresh_brings_a_warning(recorded, site):
    with pytest.raises(ValueError, match="no check passes"):
        recorded("do nothing", [close], serve=None, url=site({"/": "x"}))
    assert "the check will be wrong: look at it" in recorded.said()


def test_a_step_that_cannot_be_replayed_is_named(recorded, site):
    """The link to /two is gone for good once it was followed."""
    followed = []

    def front(request):
        body = b"<a href='/two'>two</a>"
        if followed:
            body = b"no link"
        answer(request, body)

    def two(request):
        followed.append(request.path)
        answer(request, b"here")

    url = site({"/": front, "/two": two})
    with pytest.raises(ValueError, match="nothing was recorded: in the replay there was nothing to “click two”"):
        recorded("go to two", [presses("a[href='/two']"), close], serve=None, url=url)


def test_a_site_that_fails_is_one_sentence(recorded):
    with pytest.raises(ValueError, match="nothing was recorded: the environment failed.*exit status 3"):
        recorded("live in oslo", [], serve="exit 3 {port}")


# ---------------------------------------------------------------------------------- the command line


def command(*given, typed="", **env):
    return subprocess.run(
        [sys.executable, "rollout.py", *given],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def test_one_task_is_played_and_told(site, checkpoint):
    flags = ["--model", str(checkpoint), "--text-only"]
    flags += ["--max-turns", "2"]
    flags += ["--max-context", "2000"]
    flags += ["--max-new-tokens", "8"]
    done = command(site({"/": PAGE}), "save it", *flags)
    assert done.returncode == 0, done.stderr
    assert "== save it" in done.stdout
    assert "-- turn 2" in done.stdout
    assert "after 2 turns the agent used up its 2 turns" in done.stdout


def test_a_person_plays_by_text(site):
    """The pages, errors and ids of a policy, and codes of a page do not reach the terminal."""
    page = "<button onclick='document.title = \"saved\"'>save</button>\x1b[31mred"
    typed = 'do(action="Click", element="7")\ndo(action="Click", element="0")\nexit("saved")\n'
    done = command(site({"/": page}), "save it", "--by-hand", "--max-turns", "2", typed=typed)
    assert done.returncode == 0, done.stderr
    assert 'do(action="Wait"): wait for one second' in done.stdout
    first, second, third = re.split("-- turn [1-3]: ", done.stdout)[1:]
    assert "<button>save <0></button> [31mred" in first
    assert "error: there is no element 7" in second
    assert "title: saved\n" in third
    assert "after 3 turns the agent exited; its answer: saved" in third


def test_a_person_records_or_types():
    done = command("http://127.0.0.1/", "save it", "--by-hand", "--record", "demos.jsonl")
    assert done.returncode != 0
    assert "--record and --by-hand are two ways to play; give one" in done.stderr


def test_flags_without_effect_on_one_task_are_none():
    names = {field.name for field in fields(Config)}
    assert not names & {"concurrency", "screenshots", "judge_url", "judge_model", "reset_url"}


def test_the_policy_computes_in_the_precision_that_was_asked_for(checkpoint, monkeypatch):
    """--precision once did nothing here."""
    def load(path, dtype, device):
        raise ValueError(dtype)
    monkeypatch.setattr(model, "load", load)
    cfg = Config(model=str(checkpoint), precision="bfloat16")
    with pytest.raises(ValueError, match="torch.bfloat16"):
        one_task.play_once(cfg, {})


def test_one_task_may_start_logged_in(site, tmp_path):
    url = site({"/": "x"})
    login = tmp_path / "ada.json"
    cookie = {"name": "user", "value": "ada", "domain": "127.0.0.1", "path": "/", "expires": -1}
    login.write_text(json.dumps({"cookies": [cookie], "origins": []}))
    task = one_task.task_of(Config(url=url, task="look", storage_state=str(login)))
    assert task["storage_state"] == str(login)
    with pytest.raises(ValueError, match="storage_state .*eve.json does not exist"):
        one_task.task_of(Config(url=url, task="look", storage_state="eve.json"))


def test_what_is_wrong_is_one_sentence():
    done = command()
    assert done.returncode
    assert "required: url, task" in done.stderr
    assert "Traceback" not in done.stderr

    def refused(says, **flags):
        with pytest.raises(ValueError, match=says):
            one_task.main(Config(task="save it", **flags))

    nobody = "http://127.0.0.1:9/"
    refused("cannot reach http://127.0.0.1:9/", url=nobody)
    refused("start_url is 'nowhere'", url="nowhere")
    refused(r"http://\[abc is no address", url="http://[abc")
    refused("serve is 'true'", url=nobody, serve="true")
    refused("give --serve", url="http://127.0.0.1:{port}/")
