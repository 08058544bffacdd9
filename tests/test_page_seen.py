"""Pages as people see them (worlds/page/): states that only style sheets draw, names that people would use, the
parts of clickable boxes, what a dialog covers, and clicks that leave the page where it was.

Each page is cut down from one of a public benchmark's applications, where the agent read something else than people saw.
"""
import json
import re
from urllib.parse import quote

import pytest
from conftest import act, answer, execute

from worlds.browser import ActionError

BEHIND = "[the page behind this dialog is left out]"
TITLE = "onclick=\"document.title = '{}'\""


def click(session, element):
    return act(session, f'do(action="Click", element="{element}")')


def check(pages, site, browse):
    """pages: what a page shows -> (its HTML, what the agent reads)."""
    async def test(session):
        for name, (_, text) in pages.items():
            await session.page.goto(f"{base}/{quote(name)}")
            assert (await session.observe())[1] == text, name
    base = site({f"/{quote(name)}": html for name, (html, _) in pages.items()} | {"/": "start"})
    browse(test, base)


# ----------------------------------------------------------------------------------------------------- editors of code

# Like CodeMirror, Ace and Monaco: the lines are drawn, and the keys go to a text field that nobody sees.
CODE_EDITOR = """<style>.lines {{ height: 60px; position: relative; white-space: pre }} textarea {{ position: absolute }}
    .none {{ width: 3px; height: 0; overflow: hidden; position: absolute }} .dot {{ width: 1px; height: 1px; border: 0; padding: 0 }}</style>
    <div class=lines>{field}<div id=drawn aria-hidden=true></div></div><button onclick="document.title = code">Save</button>
    <script>
    let code = 'a = 1\\nb = 2', all = false;
    const field = document.querySelector('textarea');
    const draw = () => drawn.textContent = code;
    field.onkeydown = event => {{
      if (event.ctrlKey && event.key === 'a') all = true;
      if (event.key === 'Backspace') code = all ? '' : code.slice(0, -1);
      if (event.key === 'Backspace') all = false;
      draw();
    }};
    field.oninput = () => {{ code += field.value; field.value = ''; draw(); }};
    draw();
    </script>"""
FIELDS = {
    "of one pixel": "<textarea class=dot aria-label=Code></textarea>",
    "cut off by its box": "<div class=none><textarea aria-label=Code></textarea></div>",
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_editor_that_draws_its_text_is_a_text_field(site, browse, field):
    async def test(session):
        _, text = await session.observe()
        assert "<textarea>Code <0> = a = 1 b = 2</textarea>" in text
        text = await act(session, 'do(action="Type", argument="c = \\"3\\"", element="0")')
        assert '<textarea>Code <0> = c = "3"</textarea>' in text
        assert "title: c = \"3\"" in await click(session, 1)
    browse(test, site({"/": CODE_EDITOR.format(field=FIELDS[field])}))


# Like CodeMirror 6 and Monaco today: no text field. A key opens and closes brackets; what is pasted stays as it is.
MODERN_EDITOR = """<style>.lines { height: 60px; white-space: pre }</style>%s<button onclick="document.title = code">Save</button>
    <script>
    let code = 'old';
    const draw = () => { if (where.isContentEditable) where.textContent = code; else drawn.textContent = code; };
    where.onkeydown = event => {
      if (event.key === 'Backspace') code = '';
      else if (!event.ctrlKey && event.key.length === 1) code += event.key + (event.key === '(' ? ')' : '');
      event.preventDefault();
      draw();
    };
    where.onpaste = event => {
      code += event.clipboardData.getData('text/plain');
      event.preventDefault();
      draw();
    };
    %s
    draw();
    </script>"""
MODERN_EDITORS = {
    "CodeMirror 6": ("<div id=where class=lines contenteditable spellcheck=false autocapitalize=off role=textbox aria-label=Code></div>", ""),
    "Monaco": (
        "<div class=lines style='position:relative'><div id=where role=textbox tabindex=0 aria-label=Code "
        "style='position:absolute;width:1px;height:1px'></div><div id=drawn aria-hidden=true></div></div>",
        "where.editContext = new EditContext();"),
}


@pytest.mark.parametrize("name", MODERN_EDITORS)
def test_code_stays_as_it_is_written(site, browse, name):
    html, script = MODERN_EDITORS[name]
    code = "def f(x):\n    return (x\n"

    async def test(session):
        _, text = await session.observe()
        assert "Code <0> = old" in text
        await execute(session, f'do(action="Type", argument={json.dumps(code)}, element="0")')
        assert await session.page.evaluate("code") == code
    browse(test, site({"/": MODERN_EDITOR % (html, script)}))


NO_EDITORS = {
    "a hidden field beside others": (
        "<form>Name <input aria-label=name> <textarea style='width:1px;height:1px;border:0;padding:0' name=trap></textarea></form>",
        "Name <input>name <0></input> <textarea>trap <1></textarea>"),
    "a field that floats out of its box": (
        "<section>Your view<div style='height:0'><textarea aria-label=View style='float:left'>good</textarea></div></section>",
        "Your view\n<textarea>View <0> = good</textarea>"),
    "a field that Tab leaves out": (
        "<div>copied <textarea tabindex=-1 style='width:1px;height:1px;border:0;padding:0'></textarea></div>",
        "<textarea>copied <0></textarea>"),
    "a field that nobody can type into": (
        "<div>text <textarea readonly style='width:1px;height:1px;border:0;padding:0'>x</textarea></div>",
        "<textarea>text <0> = x</textarea>"),
}


def test_not_every_small_text_field_is_an_editor(site, browse):
    check(NO_EDITORS, site, browse)


# ------------------------------------------------------------------------------------------------ clicks and scrolling

SEEN = {
    "passwords": (
        "<input type=password aria-label=Password value=secret> <input type=password aria-label=PIN>",
        "<input>Password <0> = ****</input> <input>PIN <1></input>"),
    "a bar that does not go to 100, and a picture with a title alone": (
        "<div role=progressbar aria-valuenow=3 aria-valuemax=5 style='height: 9px'></div>"
        "<img title='Sold out' width=9 height=9>", "3 of 5\nSold out"),
    "items of menus that say what they are": (
        "<div role=menuitemcheckbox aria-checked=true>Wrap</div><div role=menuitemradio>Left</div>",
        "<div>Wrap <0> = checked</div> <div>Left <1></div>"),
    "a field with a hint and a tooltip": ("<input placeholder=Email title='Only for receipts'>", "<input>Email <0></input>"),
    "options that the page hides": (
        "<select aria-label=City><option>Rome<option hidden>Oslo<option style='display: none'>Bergen"
        "<optgroup hidden label=more><option>Turku</optgroup></select>", "<select>City <0> = Rome (Rome)</select>"),
    "suggestions": (
        "<input aria-label=Tag list=tags value=ur><datalist id=tags><option>urgent<option>backlog</datalist>",
        "<input>Tag <0> = ur (urgent | backlog)</input>"),
    "a drawn slider": (
        "<div role=slider aria-label=Volume aria-valuenow=3 tabindex=0>o</div>", "<input>Volume <0> = 3</input>"),
    "a slider that listens on its parts": (
        "<div role=slider aria-label=Volume aria-valuenow=3 tabindex=0><b onmousedown='go()'>o</b></div>",
        "<input>Volume <0> = 3</input>"),
    "bars that have no end yet, and shares": (
        "<progress></progress><p>Loading <progress></progress></p><meter value=0.3333333></meter>", "Loading\n0.33 of 1"),
    "rows that the arrow keys reach": (
        """<ul><li class=r tabindex=0>One <button>x</button></li><li class=r tabindex=-1>Two <button>y</button></li></ul>
        <script>for (const el of document.querySelectorAll('.r')) el.onclick = () => {}</script>""",
        "<li>One <0></li> <button>x <1></button>\n<li>Two <2></li> <button>y <3></button>"),
    "a slider that holds controls is none": (
        "<div role=slider aria-valuenow=1 tabindex=0><a href=x>Read more</a></div>", "<a>Read more <0></a>"),
    "pictures that draw nothing": (
        """<i id=a aria-hidden=true style="position: fixed; inset: 40px 0 0 0"></i><b id=c aria-hidden=true style="display: block;
        height: 1px"></b>text<script>a.onclick = c.onclick = () => {}</script>""", "text"),
    "a row that holds a button": (
        "<div id=r role=row>Ann <button>x</button></div><script>r.onclick = () => {}</script>",
        "<div>Ann <0></div> <button>x <1></button>"),
    "a slider of the browser's that is called one": (
        "<input type=range role=slider aria-label=Size aria-valuenow=3 value=70>", "<input>Size <0> = 70</input>"),
    "hidden boxes that listen and hold a button": (
        "<span id=s aria-hidden=true><button>x</button></span>text<script>s.onclick = () => {}</script>", "text"),
    "bars without a value": ("<div role=progressbar style='height: 9px'></div>text", "text"),
    "bars": (
        "<div role=progressbar aria-valuenow=37 style='height: 9px'></div><div role=meter aria-valuetext='low'"
        " style='height: 9px'></div><progress value=2 max=5></progress>", "37 of 100\nlow\n2 of 5"),
    "Select2, empty": (
        """<label for=s>User</label><select id=s aria-hidden=true style="position: absolute; width: 1px; height: 1px;
        clip: rect(0 0 0 0)"></select><span role=combobox tabindex=0 aria-expanded=false aria-labelledby=z class=choice
        style="display: block; height: 28px"><span id=z role=textbox aria-readonly=true style="display: block"></span></span>""",
        "User <span>User <0></span>"),
    "Select2, chosen": (
        """<span role=combobox tabindex=0 aria-expanded=true aria-labelledby=z><span id=z role=textbox
        aria-readonly=true>France</span></span>""", "<span>France <0> = expanded</span>"),
    "a dropdown that a drawn one stands for": (
        """<label for=b>Languages</label><div style="position: relative"><select multiple id=b style="position: absolute;
        opacity: 0; pointer-events: none"><option>C<option selected>Go</select><span>Go</span></div>""", "Languages\nGo"),
    "a dialog that takes the focus, and listens": (
        """<div id=m role=dialog tabindex=-1 aria-labelledby=t><h5 id=t>Delete it</h5><p>Really?</p><button>Yes</button></div>
        <script>m.addEventListener('mousedown', () => {})</script>""",
        "##### Delete it\nReally?\n<button>Yes <0></button>"),
    "the crosses of tags": (
        """<span>red <svg id=x class=remove aria-hidden=true width=16 height=16></svg></span> <span>blue <b id=y
        aria-hidden=true style="cursor: pointer">×</b></span> <i aria-hidden=true style="cursor: pointer">a word</i>
        <script>x.addEventListener('click', () => {})</script>""",
        "red <svg>remove <0></svg> blue <b>× <1></b>"),
    "what lies behind a dialog and closes it": (
        "<i id=b aria-hidden=true style='position: fixed; inset: 0'></i><script>b.onclick = () => {}</script>",
        "[this page is empty]"),
    "a page that an open menu hides from those who cannot see it": (
        """<div aria-hidden=true><h1>Order 7</h1><p>Ship to Berlin by 12 May</p><button>City</button></div>
        <div role=listbox><div role=option>Berlin</div></div>""",
        "[the page behind this dialog is left out]\n<div>Berlin <0></div>"),
    "parts of a page that nobody can see or hear": (
        """<div role=listbox><div role=option>Berlin</div></div><div aria-hidden=true style="visibility: hidden">a closed menu with
        many <a href=x>links</a></div><div aria-hidden=true style="max-height: 0; overflow: hidden">a closed part with many
        <a href=x>links</a></div>""", "<div>Berlin <0></div>"),
    "a part of a page that is heard elsewhere": (
        "<div aria-hidden=true>a copy of what runs along, with <a href=x>links</a></div>", "[this page is empty]"),
    "disabled fields that have faded": (
        "text<div style='opacity: 0'><button disabled>Pay</button><input disabled aria-label=Card></div>", "text"),
    "names that are empty": (
        "<button aria-labelledby=''>Save</button><div onclick='go()'>Report</div>", "<button>Save <0></button> <div>Report <1></div>"),
    "swatches and stars in a list that listens": (
        """<style>li { width: 30px; height: 30px } .ic::before { content: "★" }</style><ul id=u><li title=Red style="background: red">
        <li><i class=ic></i></ul><script>u.onclick = () => {}</script>""", "<li>Red <0></li> <li>ic <1></li>"),
    "a slider with a thumb of its own": (
        "<div role=slider aria-label=Price aria-valuenow=3 tabindex=0 style='cursor: ew-resize'><button tabindex=-1></button></div>",
        "<input>Price <0> = 3</input>"),
    "crosses that style sheets draw": (
        """<style>.cross::after { content: "×" } .fa::before { content: "y" }</style><b id=x class=cross aria-hidden=true></b>
        <b id=y aria-hidden=true><i class=fa></i></b><script>x.onclick = y.onclick = () => {}</script>""",
        "<b>cross <0></b> <b>fa <1></b>"),
    "boxes side by side that listen": (
        """<div id=p tabindex=-1>Side <a href=x>one</a></div><div id=q tabindex=-1>Content <a href=y>two</a></div>
        <script>p.onclick = q.onclick = () => {}</script>""", "Side <a>one <0></a>\nContent <a>two <1></a>"),
    "a slide that nobody sees yet": (
        """<div style="width: 100px; height: 50px; overflow: hidden; white-space: nowrap"><p style="display: inline-block;
        width: 100px">now</p><p style="display: inline-block; width: 100px" aria-hidden=true>next <a href=x>a link with many words
        in it</a></p></div>""", "now"),
    "words that a program made up": (
        """<style>b { display: inline-block; width: 9px; height: 9px }</style><b onclick='go()' class="calendar svelte-16sct4k"></b>
        <b onclick='go()' class="mx2luwm6 trash"></b><b onclick='go()' class="sc-bdVaJa pen"></b>""",
        "<b>calendar <0></b> <b>trash <1></b> <b>pen <2></b>"),
    "a drawn checkbox with its tick": (
        """<label for=k>Accept</label><button id=k role=checkbox aria-checked=true>✓</button>""",
        "<checkbox>Accept <0> = on</checkbox>"),
    "a class that tells of a neighbor": (
        "<button class='segment-after-checked'>Day</button><button class=segment-checked>Week</button>",
        "<button>Day <0></button> <button>Week <1> = selected</button>"),
    "a slider for the keys under a drawn one": (
        """<div style="position: relative; width: 100px; height: 20px"><span style="position: absolute; inset: 0;
        background: silver"></span><div style="width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
        position: absolute"><input type=range aria-label=Size value=30></div></div>""", "<input>Size <0> = 30</input>"),
    "handlers that Svelte and Solid keep": (
        """<p id=a>Add</p><p id=b>Beam</p><p id=c>Cut</p><p id=d>Dab</p><script>a.__click = () => {}; b.$$click = () => {};
        c[Symbol('events')] = {click: () => {}}; d[Symbol('events')] = {input: () => {}}</script>""",
        "<p>Add <0></p> <p>Beam <1></p> <p>Cut <2></p>\nDab"),
    "a tooltip and an icon beside a name": (
        """<button aria-label=Bold title="Bold (Ctrl-B)"><i class=fa></i></button><button aria-label=Close>
        <i role=img aria-label=close></i></button>""", "<button>Bold <0></button> <button>Close <1></button>"),
    "a sorted column": (
        "<table><tr><th aria-sort=descending><button>Price</button><th aria-sort=none><button>Name</button></table>",
        "<button>Price <0> = descending</button> | <button>Name <1></button>"),
    "a menu scaled to nothing": (
        "<div style='transform: scale(0)'>Signed in as ada</div><p style='transform: scale(2)'>here</p>", "here"),
}


def test_what_people_see_of_a_control_and_nothing_else(site, browse):
    check(SEEN, site, browse)


def test_what_shows_a_hand_only_under_the_mouse_can_be_clicked(site, browse):
    """The days of bootstrap-datepicker, in a rule with several selectors. The calendar listens for all of them."""
    page = """<style>td.focused, td.day:hover { cursor: pointer } .week:not(:hover) { cursor: pointer }
        td.off, td.off:hover { cursor: default } .row { &:hover { cursor: pointer } } a:hover, #all :hover { cursor: pointer }
        @media print { td:hover { cursor: pointer } }</style><h1>March</h1><a name=top>top</a>
        <div id=all><table><tr><td class=day>1<td class=day>2<td class=old>3<td class="day off">4</table></div>
        <script>all.onclick = event => { if (event.target.matches('.day')) document.title = event.target.textContent; }</script>"""

    async def test(session):
        assert (await session.observe())[1] == "# March\ntop\n<td>1 <0></td> | <td>2 <1></td> | 3 | 4"
        assert "title: 2" in await click(session, 1)
    browse(test, site({"/": page}))


def test_what_stands_in_a_slot_is_used_apart(site, browse):
    """Shoelace's tabs: the shadow root listens, and the page's own elements are in its slots."""
    page = """<x-tabs><b role=tab slot=nav>One</b><i slot=nav><b role=tab>Two</b></i><p>panel</p></x-tabs><script>
        customElements.define('x-tabs', class extends HTMLElement {
          constructor() {
            super();
            this.attachShadow({mode: 'open'}).innerHTML = '<div><slot name=nav></slot></div><slot></slot>';
            this.shadowRoot.firstChild.addEventListener('click', ({target}) => document.title = target.textContent);
          }
        });</script>"""

    async def test(session):
        assert (await session.observe())[1] == "<b>One <0></b> <b>Two <1></b>\npanel"
        assert "title: Two" in await click(session, 1)
    browse(test, site({"/": page}))


ROW = """<script>customElements.define('x-row', class extends HTMLElement {
    connectedCallback() {
      this.attachShadow({mode: 'open'}).innerHTML = `<p><a href=/${this.id}>row ${this.id}</a></p>`;
    }
  });
  const add = (box, tag) => {
    for (let i = 0; i < 20; i++) box.append(Object.assign(document.createElement(tag), {id: i}));
  }</script>"""
PANEL = """<script>customElements.define('x-panel', class extends HTMLElement {
    constructor() {
      super();
      this.attachShadow({mode: 'open'}).innerHTML = '<div style="height: 200px; overflow: auto"><slot></slot></div>';
    }
  })</script>"""
SCROLLED = {  # what scrolls, and 20 links in it
    "a panel around shadow roots": ROW + "<div id=box style='height: 200px; overflow: auto'></div>below<script>add(box, 'x-row')</script>",
    "a panel in a shadow root around slots": (ROW + PANEL + "<x-panel id=box></x-panel><div style='height: 600px'>below</div><script>add(box, 'p');"
                                              "for (const p of box.children) p.innerHTML = `<a href=/>row ${p.id}</a>`</script>"),
    "a page under a header that stays": (ROW + "<header style='position: sticky; top: 0; height: 60px; background: white'>"
                                         "head</header><div id=box></div><p style='height: 900px'></p><script>add(box, 'x-row')</script>"),
}


@pytest.mark.parametrize("name", SCROLLED)
def test_what_is_scrolled_out_of_sight_past_a_shadow_root_is_still_there(site, browse, name):
    """Its links were gone: whether something scrolls to them was asked within the shadow root alone."""
    async def test(session):
        for _ in range(3):
            seen = (await session.observe())[1]
            assert seen.count("<a>row ") == 20, seen
            await act(session, 'do(action="Scroll Down")')
        assert "row 0" in await click(session, 0) or session.page.url.endswith("/0")
    browse(test, site({"/": "<!doctype html>" + SCROLLED[name], "/0": "row 0"}))


def test_a_dialog_drawn_in_a_shadow_root_covers_the_page(site, browse):
    """Shoelace's: what dims the page and the panel stand in the shadow root, the dialog's content in its slot."""
    page = """<a href=/>shop</a><x-dialog>Sure? <button onclick="document.title = 'done'">Yes</button></x-dialog>
        <script>document.querySelector('x-dialog').attachShadow({mode: 'open'}).innerHTML =
          `<style>:host { display: contents } .all { position: fixed; inset: 0 } .dim { background: #0008 }
           .panel { position: relative; width: 300px; margin: 200px auto; z-index: 2 }</style>
           <div class=all><div class='all dim'></div><div class=panel><h2>Delete</h2><slot></slot></div></div>`</script>"""

    async def test(session):
        assert (await session.observe())[1] == BEHIND + "\n## Delete\nSure? <button>Yes <0></button>"
        assert "title: done" in await click(session, 0)
    browse(test, site({"/": page}))


def test_a_box_at_the_top_of_a_shadow_root_that_shows_a_hand_is_used(site, browse):
    page = """<div id=host></div><span id=card onclick=1></span><script>
        const root = host.attachShadow({mode: 'open'});
        root.innerHTML = '<p style="cursor: pointer">open</p>';
        root.addEventListener('click', () => document.title = 'opened');
        card.attachShadow({mode: 'open'}).innerHTML = '<p style="cursor: pointer">Card</p><p>5</p>';</script>"""

    async def test(session):
        assert (await session.observe())[1] == "<p>open <0></p>\n<span>Card 5 <1></span>"
        assert "title: opened" in await click(session, 0)
    browse(test, site({"/": page}))


def test_a_page_that_registers_a_service_worker_goes_on_without(site, browse):
    page = """<p id=said>starting</p><script type=module>
        const registration = await navigator.serviceWorker.register('/sw.js');
        registration.addEventListener('updatefound', () => 0);
        await navigator.serviceWorker.ready;
        navigator.serviceWorker.addEventListener('message', () => 0);
        await navigator.serviceWorker.getRegistrations();
        said.textContent = 'started';</script>"""

    async def test(session):
        assert (await session.observe())[1] == "started"
    browse(test, site({"/": page, "/sw.js": ""}))


def test_a_switch_that_people_see_is_on_when_it_is_checked(site, browse):
    """Its aria-checked may be left from the beginning."""
    async def test(session):
        await session.observe()
        assert "<checkbox>Wifi <0> = on</checkbox>" in await click(session, 0)
    browse(test, site({"/": "<label><input type=checkbox role=switch aria-checked=false> Wifi</label>"}))


def test_a_switch_is_on_when_its_script_says_so(site, browse):
    """Element Plus: the script cancels the click, so Chromium takes back what `checked` was set to."""
    page = """<label for=i>Wifi</label><div id=s><input id=i type=checkbox role=switch aria-checked=false
        style="position: absolute; width: 0; height: 0; opacity: 0"><span style="display: inline-block; width: 40px; height: 20px">
        </span></div><script>
        let on = false;
        s.onclick = event => { event.preventDefault(); on = i.checked = !on; i.setAttribute('aria-checked', on); };</script>"""

    async def test(session):
        assert "<checkbox>Wifi <0> = off</checkbox>" in (await session.observe())[1]
        assert "= on</checkbox>" in await click(session, 0)
        assert "= off</checkbox>" in await click(session, 0)
    browse(test, site({"/": page}))


async def problem_with(session, text) -> str:
    """What an action says when it fails, else ""."""
    try:
        await execute(session, text)
    except ActionError as error:
        return str(error)
    return ""


SLIDER = """<div id=s role=slider aria-label=Price aria-valuemin=0 aria-valuemax=50 aria-valuenow=20 tabindex=0>o</div>
    <script>
    s.onkeydown = ({key}) => {
      const step = {ArrowRight: 5, ArrowLeft: -5}[key] ?? 0;
      s.ariaValueNow = Math.max(0, Math.min(50, Number(s.ariaValueNow) + step));
    };
    </script>"""


@pytest.mark.parametrize("text, at, error", [
    ("35", 35, ""),
    ("0", 0, ""),
    ("20", 20, ""),
    ("33", 35, "the slider 0 is at 35 now: by the keys it does not come to 33"),
    ("90", 50, "is at 50 now"),
    ("22", 25, "is at 25 now"),
    ("18", 15, "is at 15 now"),
    ("much", 20, "is a slider at 20: it takes a number"),
])
def test_a_drawn_slider_is_moved_by_typing_a_number(text, at, error, site, browse):
    async def test(session):
        await session.observe()
        assert error in await problem_with(session, f'do(action="Type", argument="{text}", element="0")')
        assert f"<input>Price <0> = {at}</input>" in (await session.observe())[1]
    browse(test, site({"/": SLIDER}))


def test_a_slider_that_runs_to_the_left_is_moved_up_by_its_upward_key(site, browse):
    page = SLIDER.replace("{ArrowRight: 5, ArrowLeft: -5}", "{ArrowRight: -5, ArrowLeft: 5, ArrowUp: 5, ArrowDown: -5}")

    async def test(session):
        await session.observe()
        assert await problem_with(session, 'do(action="Type", argument="35", element="0")') == ""
        assert "= 35</input>" in (await session.observe())[1]
    browse(test, site({"/": page}))


@pytest.mark.parametrize("value", ["5e-324", "Infinity", "much"])
def test_a_slider_that_gives_odd_numbers_ends_no_run(value, site, browse):
    page = f"""<div id=s role=slider aria-valuenow=0 tabindex=0>o</div>
        <script>s.onkeydown = () => s.ariaValueNow = '{value}'</script>"""

    async def test(session):
        await session.observe()
        await problem_with(session, 'do(action="Type", argument="5", element="0")')
    browse(test, site({"/": page}))


def test_a_slider_that_is_drawn_in_a_later_frame_is_waited_for(site, browse):
    later = SLIDER.replace("s.onkeydown = ({key}) => {", "s.onkeydown = event => requestAnimationFrame(() => "
                           "requestAnimationFrame(() => move(event)));\n    const move = ({key}) => {")

    async def test(session):
        await session.observe()
        assert await problem_with(session, 'do(action="Type", argument="40", element="0")') == ""
        assert "<input>Price <0> = 40</input>" in (await session.observe())[1]
    browse(test, site({"/": later}))


def test_a_part_of_a_date_is_overwritten(site, browse):
    """React Aria's: a Backspace would delete one digit, or move to the part before."""
    page = """<div id=y contenteditable spellcheck=false autocapitalize=off role=spinbutton aria-label=year
        onkeydown="event.preventDefault(); keys.push(event.key); document.title = keys.join(' ')">2024</div>
        <script>const keys = []</script>"""

    async def test(session):
        await session.observe()
        assert "title: 2 0 2 5" in await act(session, 'do(action="Type", argument="2025", element="0")')
    browse(test, site({"/": page}))


def test_a_long_text_in_an_editor_is_read(site, browse):
    text = " ".join(f"word{i}" for i in range(180))

    async def test(session):
        assert "word179 <0></div>" in (await session.observe())[1]
    browse(test, site({"/": f"<div contenteditable>{text}</div>"}))


def test_what_moves_in_a_shadow_root_is_waited_for(site, browse):
    page = """<x-more></x-more><script>customElements.define('x-more', class extends HTMLElement {
          constructor() {
            super();
            this.attachShadow({mode: 'open'}).innerHTML = '<button>More</button><p>the details</p>';
            const [button, details] = this.shadowRoot.children;
            details.style.display = 'none';
            button.onclick = () => {
              details.style.display = '';
              const moving = details.animate([{opacity: 0, transform: 'scale(0)'}, {opacity: 1, transform: 'none'}], 400);
              moving.onfinish = () => document.title = 'all there';
            };
          }
        });</script>"""

    async def test(session):
        await session.observe()
        assert "title: all there" in await click(session, 0)
    browse(test, site({"/": page}))


def test_a_slider_without_a_number_says_so(site, browse):
    async def test(session):
        await session.observe()
        said = await problem_with(session, 'do(action="Type", argument="5", element="0")')
        assert "does not say where it stands" in said
    browse(test, site({"/": "<div role=slider aria-label=Volume aria-valuenow=high tabindex=0>o</div>"}))


def test_a_slider_without_keys_says_so(site, browse):
    async def test(session):
        await session.observe()
        assert "is at 3 now" in await problem_with(session, 'do(action="Type", argument="5", element="0")')
    browse(test, site({"/": "<div role=slider aria-label=Volume aria-valuenow=3 tabindex=0>o</div>"}))


def test_scrolling_finds_the_panel_beside_the_middle(site, browse):
    page = """<style>div { position: fixed; top: 0; left: 0; height: 100px; overflow: auto } #log { width: 200px }
        #small { width: 50px; left: 300px }</style><div id=small><p style="height: 900px">b</div>
        <div id=log><p style="height: 900px">a</div>"""

    async def test(session):
        await act(session, 'do(action="Scroll Down")')
        assert await session.page.evaluate("[log.scrollTop > 0, small.scrollTop]") == [True, 0]
        await act(session, 'do(action="Scroll Up")')
        assert await session.page.evaluate("log.scrollTop") == 0
    browse(test, site({"/": page}))


# An application as high as the window. Something in it reaches out below, so the browser can scroll the application
# away, but people cannot, and nothing would bring it back.
APP = """<style>body { margin: 0 } #app { height: 100vh; overflow: hidden; position: relative }
    #panel { height: 300px; overflow: auto; position: absolute; inset: auto 0 0 0 } #out { position: absolute; top: 1500px }</style>
    <div id=app><h1>head</h1><div id=panel>LIST</div><div id=out>OUT</div></div>"""
LINKS = "".join(f"<p><a href='#{i}'>go {i}</a>" for i in range(60))
AT = "[app.scrollTop, document.scrollingElement.scrollTop]"


@pytest.mark.parametrize("body", ["", "<style>body { overflow: hidden } #app { overflow: visible }</style>"])
def test_a_click_scrolls_only_what_people_can_scroll_back(site, browse, body):
    async def test(session):
        await session.observe()
        await click(session, 50)
        assert session.page.url.endswith("#50")
        assert await session.page.evaluate(AT) == [0, 0]
        assert await session.page.evaluate("panel.scrollTop") > 500
    page = APP.replace("LIST", LINKS).replace("OUT", "tail")
    browse(test, site({"/": body + page}))


def test_a_click_follows_what_moves_when_the_mouse_leaves_a_menu(site, browse):
    """A menu in the page's flow pushes three buttons down while the mouse is on it. Here in a frame as well."""
    async def test(session):
        for path in ("/", "/frame"):
            await session.page.goto(base + path)
            await session.observe()
            text = await act(session, 'do(action="Hover", element="0")')
            assert "<button>Clear <1></button>\n<button>one <2></button> <button>two <3></button>" in text
            assert "pressed two" in await click(session, 3)
    buttons = "".join(f"<button onclick='said.textContent = `pressed ${{name}}`' name={name}>{name}</button>"
                      for name in ("one", "two", "three"))
    menu = f"""<style>.list {{ display: none }} .menu:hover .list {{ display: block }} button {{ display: block; height: 30px }}</style>
        <div class=menu tabindex=0 onclick=1>More<div class=list><button>Clear</button></div></div>{buttons}<p id=said>"""
    base = site({"/": menu, "/frame": "<iframe src=/ width=500 height=300></iframe>"})
    browse(test, base)


def test_typing_scrolls_only_what_people_can_scroll_back(site, browse):
    async def test(session):
        await session.observe()
        assert "<input>city <0> = Oslo</input>" in await act(session, 'do(action="Type", argument="Oslo", element="0")')
        assert await session.page.evaluate(AT) == [0, 0]
    low = "position: absolute; height: 80px; top: calc(100vh - 20px)"  # the window cuts most of it off
    browse(test, site({"/": APP.replace("LIST", "").replace("OUT", "tail").replace(
        "<div id=out>", f"<input aria-label=city style='{low}'><div id=out>")}))


def test_what_is_out_of_reach_can_be_clicked_and_the_page_goes_back(site, browse):
    """The window is too small for the page: people would take a larger one."""
    async def test(session):
        await session.observe()
        await click(session, 50)
        assert session.page.url.endswith("#50")
        assert await session.page.evaluate(AT) == [0, 0]
    browse(test, site({"/": APP.replace("LIST", LINKS).replace("OUT", "").replace("position: absolute; inset: auto 0 0 0", "").replace("height: 300px", "")}))


def test_scrolling_moves_the_panel_and_not_a_page_that_stands_still(site, browse):
    async def test(session):
        await session.observe()
        await act(session, 'do(action="Scroll Down")')
        assert await session.page.evaluate("[document.scrollingElement.scrollTop, panel.scrollTop > 0]") == [0, True]
    page = APP.replace("LIST", LINKS).replace("OUT", "").replace("height: 300px", "height: 600px")
    browse(test, site({"/": "<style>body { overflow: hidden }</style>" + page + "<p style='height:900px'>"}))


def test_what_a_box_cuts_off_is_used_where_it_is_seen(site, browse):
    """The middle of a link that is too long for its cell lies in the next cell."""
    async def test(session):
        _, page = await session.observe()
        for i, name in enumerate(["first", "second", "next"]):
            assert f"{name} title" in page and f" <{i}></a>" in page
            page = await click(session, i)
            assert session.page.url.endswith(f"#{name}")
    long = "title of an issue that is too long for its cell and ends where nobody sees it"
    cell = "<td style='max-width: 80px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap'>"
    browse(test, site({"/": f"""<table><tr>{cell}<a href='#first'>first {long}</a>{cell}<a href='#second'>second {long}</a>
        <td width=700><a href='#next'>next title</a></table>"""}))


def test_a_switch_without_a_size_is_pressed_on_its_label(site, browse):
    async def test(session):
        assert "<checkbox>Dark mode <0> = off</checkbox>" in (await session.observe())[1]
        assert "<checkbox>Dark mode <0> = on</checkbox>" in await click(session, 0)
    page = """<style>label { position: relative; display: inline-block; width: 40px; height: 20px }
        input { opacity: 0; width: 0; height: 0; margin: 0 }
        span { position: absolute; left: 10px; width: 20px; height: 20px; background: #ccc }</style>
        <div>Dark mode <label><input type=checkbox><span></span></label></div>"""
    browse(test, site({"/": page}))


@pytest.mark.parametrize("style", ["position:absolute;opacity:0;width:0;height:0", "display:none"])
def test_a_checkbox_is_ticked_beside_the_link_in_the_middle_of_its_label(style, site, browse):
    """The press on the label's middle followed the link, and the box stayed off."""
    async def test(session):
        named = "<checkbox>I agree to the Terms of Service of the Company here <0> = "
        assert named + "off</checkbox>" in (await session.observe())[1]
        assert named + "on</checkbox>" in await click(session, 0)
        await click(session, 1)
        assert session.page.url.endswith("/terms")
    browse(test, site({"/": f"<label><input type=checkbox style='{style}'> I agree to the "
                            "<a href=/terms>Terms of Service of the Company</a> here</label>", "/terms": "terms"}))


@pytest.mark.parametrize("style", [
    "position:absolute;width:1px;height:1px;overflow:hidden;clip:rect(0 0 0 0)", "position:absolute;clip-path:inset(50%)",
    "position:absolute;opacity:0;pointer-events:none"])
@pytest.mark.parametrize("top", [0, 2000])
def test_a_choice_whose_buttons_only_the_keys_reach_is_pressed_on_its_labels(style, top, site, browse):
    """In a grid the labels lie elsewhere than the buttons: two of three were missing."""
    async def test(session):
        sizes = "<radio>S <0> = off</radio>\n<radio>M <1> = off</radio>\n<radio>L <2> = off</radio>"
        assert (await session.observe())[1].startswith(sizes)
        assert await click(session, 1) == sizes.replace("M <1> = off", "M <1> = on")
        assert "L <2> = on" in await click(session, 2)
    sizes = "".join(f"<input type=radio name=size id={size}><label for={size}>{size}</label>" for size in "SML")
    browse(test, site({"/": f"<style>div {{ display: grid; grid-template-columns: repeat(3, 60px); margin: {top}px 0 }} "
                            f"input {{ {style} }} label {{ padding: 9px }}</style><div>{sizes}</div>"}))


@pytest.mark.parametrize("style", ["", "clip-path:circle()"])
def test_a_checkbox_with_a_hidden_label_is_pressed_itself(style, site, browse):
    async def test(session):
        assert "<checkbox>News <0> = off</checkbox>" in (await session.observe())[1]
        assert "<checkbox>News <0> = on</checkbox>" in await click(session, 0)
    browse(test, site({"/": "<div style='height:90px;overflow:auto'><p style='height:300px'></p>"
                            f"<label for=a hidden>News</label><input type=checkbox id=a style='{style}'></div>"}))


@pytest.mark.parametrize("rules, row", [
    (".row:hover .drop, .other:hover { display: inline } .drop { display: none }", "<div class=row>{}</div>"),
    ("@media all { tr:hover .drop { visibility: visible } } .drop { visibility: hidden }", "<table><tr><td>{}</table>"),
])
def test_what_comes_while_the_mouse_is_over_a_row_is_reached_by_hover(rules, row, site, browse):
    async def test(session):
        tag = "tr" if "<tr>" in row else "div"
        assert (await session.observe())[1].split() == f"<{tag}>Milk <0></{tag}> <{tag}>Bread <1></{tag}>".split()
        page = await act(session, 'do(action="Hover", element="1")')
        assert page.split() == f"<{tag}>Milk <0></{tag}> Bread <button>Delete <1></button>".split()
        await click(session, 1)
        assert await session.page.title() == "Bread"
    rows = [row.format(f"{name} <button class=drop {TITLE.format(name)}>Delete</button>") for name in ("Milk", "Bread")]
    browse(test, site({"/": f"<style>{rules}</style>{''.join(rows)}"}))


@pytest.mark.parametrize("rule", [
    ".row:hover .drop { color: red }",  # shows nothing
    ".row:hover .drop { display: none }",
    ".row:hover { display: block }",
    ":hover .drop { display: inline }",
    ".row { &:hover .drop { display: inline } }",
    ".row:hover .empty { display: inline }",
    ":not(.row:hover):not(*) .drop, .x:hover + .y .drop { display: inline }",
])
def test_other_rules_of_the_mouse_give_no_id(rule, site, browse):
    async def test(session):
        assert (await session.observe())[1] == "Milk"
    browse(test, site({"/": f"<style>.drop, .empty {{ display: none }} {rule}</style>"
                            "<div class=row>Milk <button class=drop>Delete</button><i class=empty></i></div>"}))


# --------------------------------------------------------------------------------------- the parts of a clickable box

LISTEN = """<script>document.addEventListener('click', event => {
    document.title = event.target.closest('[data-do]')?.dataset.do ?? '' })</script>"""
PARTS = {  # all clicks are heard by the document -> what the agent reads; what a click on each id does
    "poll": ("""<style>.card, .opt { cursor: pointer }</style><div class=card data-do=select><h3>Best colour?</h3>
        <div class=opt data-do=red>Red</div><div class=opt data-do=blue>Blue</div></div>""",
             "### <div>Best colour? <0></div>\n<div>Red <1></div> <div>Blue <2></div>", ["select", "red", "blue"]),
    "inline style": ("""<div style='cursor:pointer' data-do=row><b>Invoice</b>
        <div style='cursor:pointer' data-do=edit>Edit</div></div>""",
                     "<div>Invoice <0></div> <div>Edit <1></div>", ["row", "edit"]),
    "table": ("""<style>tr, .edit { cursor: pointer }</style><table><tr data-do=row><td>Lamp<td class=edit
        data-do=price>$24<td class=edit data-do=stock>7</table>""",
              "<tr>Lamp <0></tr> | <td>$24 <1></td> | <td>7 <2></td>", ["row", "price", "stock"]),
    "a name in a row": ("""<style>@media all { .row, a.name { cursor: pointer } }</style><div class=row data-do=select>
        <span>AM</span> <a class=name data-do=open>Aisha Mohammed</a> <span>aisha@edtech.example</span></div>""",
                        "AM <a>Aisha Mohammed <0></a> <div>aisha@edtech.example <1></div>", ["open", "select"]),
}


def test_parts_of_a_clickable_box_have_ids_of_their_own(site, browse):
    async def test(session):
        for name, (_, text, does) in PARTS.items():
            await session.page.goto(f"{base}/{quote(name)}")
            assert (await session.observe())[1] == text, name
            for element, done in enumerate(does):
                await click(session, element)
                assert await session.page.title() == done, (name, element)
                await session.page.evaluate("document.title = ''")
                await session.observe()
    base = site({f"/{quote(name)}": html + LISTEN for name, (html, *_) in PARTS.items()} | {"/": "start"})
    browse(test, base)


WHOLE = {  # a hand that is inherited, or that everything inside has, says nothing about a part
    "inherited": ("<div style='cursor:pointer'>Buy <b>milk</b> <i>now</i></div>", "<div>Buy milk now <0></div>"),
    "everything inside": ("<style>.menu, .menu * { cursor: pointer }</style><div class=menu><b>File</b> <i>F1</i></div>",
                          "<div>File F1 <0></div>"),
    "a label's parts": ("""<style>input { position: absolute; opacity: 0 } .slider { cursor: pointer; display: inline-block;
        width: 30px; height: 15px }</style><p>Contacts sync <label><input type=checkbox><span class=slider></span></label>""",
                        "<checkbox>Contacts sync <0> = off</checkbox>"),
    "all of the page": ("<body style='cursor:pointer'><p>text</p><a href=/x>on</a>", "text\n<a>on <0></a>"),
}


def test_a_hand_that_is_not_a_parts_own_gives_no_id(site, browse):
    check(WHOLE, site, browse)


# ------------------------------------------------------------------------------------------------------------- states

TOGGLE = """<style>.toggle-switch, .toggle, .menu-toggle { cursor: pointer; width: 36px; height: 20px; display: block }
    .custom-checkbox { width: 18px; height: 18px } label { cursor: pointer }</style>"""
STATES = {
    "switches drawn by style sheets": (f"""{TOGGLE}<div><span>Spell check</span>
        <div class="toggle-switch active" id=pref-spell><div class=toggle-knob></div></div></div>
        <div><div>Full names</div><div>Show names and not nicknames.</div>
        <div class=toggle-switch id=pref-names><div class=toggle-knob></div></div></div>
        <div>Sync <button class="toggle is-on"></button></div>""",
                                       "<checkbox>Spell check <0> = on</checkbox>\nShow names and not nicknames.\n"
                                       "<checkbox>Full names <1> = off</checkbox>\n<checkbox>Sync <2> = on</checkbox>"),
    "checkboxes drawn by style sheets": (f"""{TOGGLE}<label><div class="custom-checkbox checked"><svg width=9 height=9>
        </svg></div><span>Post anonymously</span></label><label><div class=custom-checkbox></div><span>Virtual only</span>
        </label>""", "<checkbox>Post anonymously <0> = on</checkbox> <checkbox>Virtual only <1> = off</checkbox>"),
    "a button that opens a menu is no switch": (f"""{TOGGLE}<button class="menu-toggle active" title=Menu><svg></svg>
        </button><button class=toggle title=Theme><svg></svg></button>""",
                                                "<button>Menu <0> = selected</button> <button>Theme <1></button>"),
    "in part": ("<label><input type=checkbox id=all>all</label><script>all.indeterminate = true</script>",
                "<checkbox>all <0> = mixed</checkbox>"),
    "in part, as trees and toolbars say it": (
        "<ul role=tree><li role=treeitem tabindex=0 aria-checked=mixed>All</ul><button aria-pressed=mixed>Bold</button>",
        "<li>All <0> = partly checked</li>\n<button>Bold <1> = partly pressed</button>"),
    "menus, tabs, segments, pages and rows": (
        """<style>div, tr { cursor: pointer }</style><div class="nav-item nav-active">Inbox</div><div class=nav-item>Sent</div>
        <ul><li class=active><a href=/1>1</a><li><a href=/2>2</a></ul><button class="tab tab--active">Fonts</button>
        <button class=tab>Styles</button><button class="seg is-selected">Solid</button><button class=seg>Image</button>
        <table><tr class="row selected"><td>Ann<td>24<tr class=row><td>Bob<td>25</table>""",
        "<div>Inbox <0> = selected</div> <div>Sent <1></div>\n<a>1 <2> = selected</a>\n<a>2 <3></a>\n"
        "<button>Fonts <4> = selected</button> <button>Styles <5></button> <button>Solid <6> = selected</button> "
        "<button>Image <7></button>\n<tr>Ann | 24 <8> = selected</tr>\n<tr>Bob | 25 <9></tr>"),
    "mail": ("""<style>.mail { cursor: pointer }</style><div class="mail unread"><button title=Star>☆</button>
        <b>Sarah Chen</b> Roadmap</div><div class=mail><button title=Star class=starred>★</button> <b>David Kim</b> Report
        </div>""", "<button>☆ Star <0></button> <div>Sarah Chen <1> = unread</div> Roadmap\n"
                   "<button>★ Star <2> = pressed</button> <div>David Kim <3></div> Report"),
    "hearts": ("""<button class="post-action liked" data-action=likePost><svg width=9 height=9></svg> 342</button>
        <button class=post-action data-action=likePost><svg width=9 height=9></svg> 7</button>""",
               "<button>342 like post <0> = pressed</button> <button>7 like post <1></button>"),
    "what pages say for screen readers comes first": (
        """<div role=tab class=active aria-selected=false>One</div><div role=tab aria-selected=true>Two</div>
        <button class=active aria-pressed=false>Bold</button><div role=switch class=on aria-checked=true>Dark</div>""",
        "<div>One <0></div> <div>Two <1> = selected</div> <button>Bold <2></button> <checkbox>Dark <3> = on</checkbox>"),
    "words that are no state": (
        """<style>div { cursor: pointer }</style><div class="user active">Ann</div><div class="user active">Bob</div>
        <button class="inactive has-selected not-current">Send</button><button class="focus:active hover:selected">Go</button>
        <p class="status active">Active</p>""",
        "<div>Ann <0></div> <div>Bob <1></div> <button>Send <2></button> <button>Go <3></button>\nActive"),
}


def test_states_that_people_see_are_told(site, browse):
    check(STATES, site, browse)


# -------------------------------------------------------------------------------------------------------------- names

ICON = "<style>.material-icons { font-family: 'Material Icons' } svg { width: 9px; height: 9px }</style>"
SVG = "<svg><text y=9>Ag</text></svg>"
NAMES = {
    "no words of the program where people read something": (
        """<table><tr><th><input type=checkbox id=select-all-rows><th>Number<tr><td><input type=checkbox class=row-checkbox
        data-check-id=inv_19><td>INV-60</table><div data-testid=email-7><div data-testid=email-checkbox-7><input
        type=checkbox></div><span>SC</span> <b>Sarah Chen</b></div><p>Color <input id=color-input value=#1E></p>""",
        "<checkbox>select all rows <0> = off</checkbox> | Number\n<checkbox>INV-60 <1> = off</checkbox> | INV-60\n"
        "<checkbox>Sarah Chen <2> = off</checkbox>\nSC\n<input>Color <3> = #1E</input>"),
    "words of the program only where there is nothing else": (
        """<style>svg { width: 9px; height: 9px }</style><button class=post-action-btn data-action=bookmarkPost><svg></svg>
        </button><button id=btn-remove-allergy-a1b2c3><svg></svg></button><button class="icon-btn"><svg></svg></button>
        <p><b id=cell-1 onclick=1><svg></svg></b><b id=cell-2 onclick=1><svg></svg></b></p>
        <svg><circle r=4 id='(-2,1)' class=point onclick=1></circle></svg>""",
        "<button>bookmark post <0></button> <button>remove allergy <1></button> <button>icon btn <2></button>\n"
        "<b>cell 1 <3></b> <b>cell 2 <4></b>\n<circle>(-2,1) <5></circle>"),
    "a table's column": (
        """<table><tr><th>Medicine<th>Note<th>Stop<tr><td>Losartan<td><input name=n><td><input type=checkbox id=dc></table>""",
        "Medicine | Note | Stop\nLosartan | <input>Note <0></input> | <checkbox>Stop <1> = off</checkbox>"),
    "a card by its title": (
        """<style>.card { cursor: pointer }</style><div class=card><div>MC</div><div>Maya Chen</div><button>Follow</button>
        </div><div class=card><svg width=9 height=9><text y=9>T</text></svg><div>Page Title</div><button>Hide</button></div>
        <div class=card><div>HR</div><button>Edit</button></div>""",
        "MC\n<div>Maya Chen <0></div>\n<button>Follow <1></button>\nT\n<div>Page Title <2></div>\n<button>Hide <3></button>\n"
        "<div>HR <4></div>\n<button>Edit <5></button>"),
    "a title before signs and drawings": (
        f"""{ICON}<button title=Fonts>{SVG}</button><a href=/x>{SVG} Styles</a><button title='Text (T)'>T</button>
        <button title=Settings>⚙</button><button title=Comments>2</button><button title='Opens the mail'>Send</button>
        <button>{SVG}</button>""",
        "<button>Fonts <0></button> <a>Styles <1></a> <button>Text (T) <2></button> <button>⚙ Settings <3></button> "
        "<button>2 Comments <4></button> <button>Send <5></button> <button>Ag <6></button>"),
    "icon fonts are no text": (
        f"""{ICON}<h1><i class=material-icons>account_balance_wallet</i> Wallet</h1><button><i class=material-icons>star</i>
        Rewards</button><button><i class=material-icons>arrow_upward</i></button>
        <button title=Help><i style='font-family:"Some Icons"'>help_outline</i></button><p class='material-note icon-text'>wallet</p>""",
        "# Wallet\n<button>Rewards <0></button> <button>arrow upward <1></button> <button>Help <2></button>\nwallet"),
    "parts that do not run together": (
        """<style>.a { background: red; padding-right: 4px } .b { padding-left: 4px }</style><label><input type=checkbox>
        <span class=a>priority</span><span class=b>critical</span></label><a href=/x><div>Lamp</div><b>$</b><b>24</b></a>""",
        "<checkbox>priority critical <0> = off</checkbox> <a>Lamp $24 <1></a>"),
    "what an empty field shows": (
        """<label>Due date <input placeholder=YYYY-MM-DD></label><label>Start <input placeholder=YYYY-MM-DD value=2026-03-07>
        </label><input placeholder='Search mail'><input aria-label=search placeholder=search>
        <div><label>Title</label><input placeholder='Add a title'></div>""",
        "<input>Due date <0> = (YYYY-MM-DD)</input> <input>Start <1> = 2026-03-07</input> <input>Search mail <2></input> "
        "<input>search <3></input>\n<input>Title <4> = (Add a title)</input>"),
    "a checkbox and its text are one": (
        """<style>.row { cursor: pointer }</style><div class=row><input type=checkbox> Projects</div>
        <div><span>Show number</span> <label><input type=checkbox checked></label></div>
        <div><input type=radio name=r> <span>Weekly</span></div><div>HR <input type=checkbox></div>""",
        "<checkbox>Projects <0> = off</checkbox>\n<checkbox>Show number <1> = on</checkbox>\n"
        "<radio>Weekly <2> = off</radio>\n<checkbox>HR <3> = off</checkbox>"),
    "texts that belong to others": (
        """<div>Size <input name=width> <input name=height></div><div><button>Send</button> <input name=city></div>
        <form>Sign in <input name=user></form><div>8 + 8 = <input name=sum></div>
        <div><p>Find the third word of this long sentence.</p><input name=word></div>
        <div><table><tr><td>Religion<td>none</table><input name=answer></div>""",
        "Size <input>width <0></input> <input>height <1></input>\n<button>Send <2></button> <input>city <3></input>\n"
        "Sign in <input>user <4></input>\n8 + 8 = <input>sum <5></input>\nFind the third word of this long sentence.\n"
        "<input>word <6></input>\nReligion | none\n<input>answer <7></input>"),
    "cards further down in a panel": (
        "<style>.card { cursor: pointer } .panel { height: 60px; overflow: auto }</style><div class=panel>" + "".join(
            f"<div class=card><b>Mail {i}</b> <button>Star</button></div>" for i in range(5))
        + "</div><div onclick=1>what lies there now</div>",
        "\n".join(f"<div>Mail {i} <{2 * i}></div> <button>Star <{2 * i + 1}></button>" for i in range(5))
        + "\n<div>what lies there now <10></div>"),
    "buttons called by their icon's file or by what a script shows": (
        """<button class=btn><svg width=9 height=9><use href='/icons.svg#trash' /></svg></button>
        <button><img src='/icons/pencil-3f9a2c1.svg?v=2' alt='' width=9 height=9></button>
        <button><img src='data:image/png;base64,AAAA' alt='' width=9 height=9></button>
        <button data-tooltip=Archive></button><button><i data-bs-title='Pin it'></i></button>""",
        "<button>trash <0></button> <button>pencil <1></button> <button> <2></button> <button>Archive <3></button> "
        "<button>Pin it <4></button>"),
    "the labels of buttons that are checkboxes": (
        """<button role=checkbox aria-checked=false id=terms></button><label for=terms>Accept terms</label>
        <label for=plane>Airplane mode</label><button role=switch aria-checked=true id=plane><span></span></button>""",
        "<checkbox>Accept terms <0> = off</checkbox> <checkbox>Airplane mode <1> = on</checkbox>"),
    "labels without a text that people see": (
        """<style>input { position: absolute; opacity: 0 } label { display: inline-block; width: 20px; height: 20px }</style>
        <input type=radio name=s id=s1><label for=s1><span style="display:none">1 star</span><i></i></label>
        <input type=radio name=s id=s2><label for=s2><svg width=9 height=9><title>2 stars</title></svg></label>
        <input type=radio name=c id=c1><label for=c1 title=Red style="cursor:pointer;background:red"></label>
        <input type=radio name=c id=c2><label for=c2><svg width=9 height=9 aria-label=Blue></svg></label>
        <input type=radio name=c id=c3><label for=c3 aria-label=Green></label>""",
        "<radio>1 star <0> = off</radio> <radio>2 stars <1> = off</radio> <radio>Red <2> = off</radio> "
        "<radio>Blue <3> = off</radio> <radio>Green <4> = off</radio>"),
    "numbers around a drawing": (
        "<button>4.5<svg width=9 height=9></svg>/5</button>", "<button>4.5/5 <0></button>"),
    "labels with parts that nobody sees, and of several parts": (
        """<label><input placeholder=Email><span style="display:none">This field is required</span></label>
        <p><label>From<input type=date>to<input type=date></label></p>
        <p id=name>Name<span style="display:none"> Help: the full name</span></p><input aria-labelledby=name>
        <h3 id=total><span style="display:block">Total</span><span style="display:block">price</span></h3>
        <button aria-labelledby=total></button><b id=close hidden><svg><title>Close</title></svg></b>
        <button aria-labelledby=close></button>""",
        "<input>Email <0></input>\n<input>From to <1></input> <input> <2></input>\nName\n<input>Name <3></input>\n"
        "### Total\n### price\n<button>Total price <4></button> <button>Close <5></button>"),
    "all that a card says beside its label": (
        f"<a href=/p aria-label=Lamp><p>{'Red lamp. ' * 15}</p><p>$15</p></a>",
        f"<a>Lamp <0> = {'Red lamp. ' * 15}$15</a>"),
    "a name with marks that nobody sees": ("<button>Ad&shy;dress\u200b book\u200e</button>", "<button>Address book <0></button>"),
    "a swatch and its color": (
        """<style>.swatch { width: 9px; height: 9px } .red { background: red }</style>
        <div class=swatch data-action=select-color style='background: #009688'></div>
        <div class='swatch selected' data-action=select-color style='background: teal'></div>
        <div class='swatch red' data-action=select-color></div>
        <div class=swatch title=Sea style='background: blue'></div><input class=swatch style='background: white'>""".replace(
            "class", "onclick=1 class"),
        "<div>select color #009688 <0></div> <div>select color #008080 <1> = selected</div> <div>select color <2></div> "
        "<div>Sea <3></div> <input>swatch <4></input>"),
    "a long card begins with its title and not with an avatar": (
        f"<div onclick=1><div>JP</div><div>Jessica Park</div><p>{'words ' * 99}</p></div>",
        f"JP\n<div>Jessica Park <0></div>\n{('words ' * 99).strip()}"),
}


def test_names_are_what_people_would_say(site, browse):
    check(NAMES, site, browse)


# ----------------------------------------------------------------------------------------------------- the notation of ids


def test_ids_cannot_be_misread(site, browse):
    """Names that end in numbers, and pages that print what looks like an id."""
    async def test(session):
        text = (await session.observe())[1]
        assert text == ("<a>Mar 10 <0></a> <a>&lt;7&gt; <1></a> <checkbox>Gift = on <2> = off</checkbox>\n"
                        "<div>Buy <3></div> milk <button>12 <4></button>")
        ids = re.findall(r"<([a-z]+)>(.*?) <(\d+)>(?: = (.*?))?</\1>", text)
        assert [name for _, name, _, _ in ids] == ["Mar 10", "&lt;7&gt;", "Gift = on", "Buy", "12"]
        assert [int(number) for _, _, number, _ in ids] == [0, 1, 2, 3, 4]
    page = ("<a href=/10>Mar 10</a> <a href=/7>&lt;7&gt;</a> <label><input type=checkbox>Gift = on</label>"
            "<div style='cursor:pointer'>Buy <i>milk</i> <button>12</button></div>")
    browse(test, site({"/": page}))


# ----------------------------------------------------------------------------------------------- what a dialog covers

PAGE = "<h1>Mail</h1><p>many words</p><a href=/x>one</a><p style='margin-top:2000px'>far <a href=/x>two</a></p>"
DIM = "position:fixed;inset:0;background:#0008"
BOX = "position:fixed;top:100px;left:300px;width:300px;background:#fff"
DIALOGS = {
    "in a layer of its own": (
        f"{PAGE}<div style='{DIM}'><div style='width:300px;margin:auto;background:#fff'><h2>Delete?</h2><button>Yes</button>"
        "</div></div>", f"{BEHIND}\n## Delete?\n<button>Yes <0></button>"),
    "beside what dims the page": (
        f"{PAGE}<div style='{DIM}'></div><div style='{BOX}'>Delete? <button>Yes</button></div>",
        f"{BEHIND}\nDelete? <button>Yes <0></button>"),
    "beside what dims the page and lets the mouse through": (
        f"{PAGE}<div><div style='{DIM};pointer-events:none'></div><div style='position:fixed;inset:0;overflow:auto'>"
        "<div style='width:300px;margin:auto;background:#fff'>Delete? <button>Yes</button></div></div></div>",
        f"{BEHIND}\nDelete? <button>Yes <0></button>"),
    "at the side": (
        f"{PAGE}<div style='{DIM}'></div><div style='position:fixed;right:0;top:0;height:100vh;width:300px;background:#fff'>"
        "Cart <button>Pay</button></div>", f"{BEHIND}\nCart <button>Pay <0></button>"),
    "before the page": (
        f"<div style='{DIM};z-index:1'><button>Yes</button></div>{PAGE}", f"<button>Yes <0></button>\n{BEHIND}"),
    "with a menu over it": (
        f"{PAGE}<div style='{DIM}'><button>Font</button></div><div style='position:absolute;top:90px;left:9px;width:99px;"
        "background:#fff'><a href=/x>Arial</a></div>", f"{BEHIND}\n<button>Font <0></button>\n<a>Arial <1></a>"),
    "the browser's own": (
        f"{PAGE}<dialog id=ask>Delete? <button>Yes</button></dialog><script>ask.showModal()</script>",
        f"{BEHIND}\nDelete? <button>Yes <0></button>"),
    "an application in a fixed layer covers nothing": (
        f"<div style='position:fixed;inset:0;overflow:auto'>{PAGE}</div>",
        "# Mail\nmany words\n<a>one <0></a>\nfar <a>two <1></a>"),
    "nor does a background": (
        f"<div style='position:fixed;inset:0;background:#eee;z-index:-1'></div>{PAGE}",
        "# Mail\nmany words\n<a>one <0></a>\nfar <a>two <1></a>"),
    "nor a header with a footer": (
        "<div style='position:fixed;top:0;left:0;right:0;height:40px'>head</div><div style='position:fixed;bottom:0;left:0;"
        f"right:0;height:40px'>foot</div><div style='padding:50px'>{PAGE}</div>",
        "head\nfoot\n# Mail\nmany words\n<a>one <0></a>\nfar <a>two <1></a>"),
    "dimmed by what stands beside it in its layer": (
        f"{PAGE}<div style='position:fixed;inset:0'><div style='{DIM}'></div><div style='position:relative;height:100%'>"
        "<button>Yes</button></div></div>", f"{BEHIND}\n<button>Yes <0></button>"),
    "dimmed by a style sheet": (
        f"<style>.ask::before {{ content: ''; {DIM} }}</style>{PAGE}<div class=ask style='position:fixed;inset:0'>"
        "<button style='position:relative'>Yes</button></div>", f"{BEHIND}\n<button>Yes <0></button>"),
    "a menu in a layer that nobody sees leaves the text": (
        f"{PAGE}<div style='position:fixed;inset:0'><div style='{DIM};opacity:0'></div><ul style='position:absolute;left:300px;top:9px'><li><button>Yes</button>"
        "</ul></div>", "# Mail\nmany words\nfar\n<button>Yes <0></button>"),
    "nor what lets clicks through": (
        f"{PAGE}<div style='{DIM};pointer-events:none'></div>", "# Mail\nmany words\n<a>one <0></a>\nfar <a>two <1></a>"),
}


def test_what_a_dialog_covers_is_left_out(site, browse):
    check(DIALOGS, site, browse)


def test_every_id_beside_a_dialog_can_be_clicked(site, browse):
    """The page behind scrolls in a panel, so most of its links have the dialog on top of them only when they come."""
    async def test(session):
        text = (await session.observe())[1]
        assert text == f"{BEHIND}\n<a>no <0></a> <a>yes <1></a>"
        await click(session, 1)
        assert session.page.url.endswith("#yes")
    page = f"<div style='height:300px;overflow:auto'>{LINKS}</div>"
    browse(test, site({"/": f"{page}<div style='{DIM}'><a href=#no>no</a> <a href=#yes>yes</a></div>"}))


# ------------------------------------------------------------------------------------------- what lies on the middle

MIDDLES = {  # a page -> what the agent reads, the title after a click on each id
    "a field under its hint": (
        "<div style='position: relative; width: 200px'><input aria-label=word style='width: 200px' " + TITLE.format("word")
        + "><span style='position: absolute; left: 4px; top: 3px; width: 150px'>Enter keyword</span></div>",
        "<input>word <0></input>\nEnter keyword", ["word"]),
    "a link under its badge": (
        "<div style='position: relative; width: 600px'><a href=# style='display: block; padding: 20px' " + TITLE.format("invoice")
        + ">Invoice 17</a><span style='position: absolute; left: 280px; top: 15px; background: #eee'>paid</span></div>",
        "<a>Invoice 17 <0></a>\npaid", ["invoice"]),
    "a button half in a panel that cannot be scrolled to it": (
        "<div style='display: flex'><button style='width: 200px' " + TITLE.format("left") + ">Left</button>"
        "<div style='overflow: auto; width: 300px; height: 60px'><button style='margin-left: -80px; width: 120px' "
        + TITLE.format("right") + ">Right</button></div></div>",
        "<button>Left <0></button>\n<button>Right <1></button>", ["left", "right"]),
    "a part of a ring": (
        "<svg width=200 height=200><path d='M100 10 A90 90 0 1 1 10 100 L50 100 A50 50 0 1 0 100 50 Z' aria-label='Europe 75%' "
        + TITLE.format("Europe") + " /></svg>", "<path>Europe 75% <0></path>", ["Europe"]),
    # It moves with the page, not with the panel that it is written in, so no scrolling of the panel frees it.
    "a button below another one": (
        "<div style='overflow-x: auto; width: 300px'>list<ul style='position: absolute; left: 500px; top: 100px; margin: 0'>"
        "<li><button>Delete</button></ul></div><div style='position: absolute; left: 490px; top: 90px; z-index: 5'>"
        "<button style='width: 300px; height: 60px' " + TITLE.format("keep") + ">Keep</button></div>",
        "list\n<button>Keep <0></button>", ["keep"]),
}


@pytest.mark.parametrize("name", MIDDLES)
def test_what_something_lies_on_is_pressed_where_it_is_free(name, site, browse):
    async def test(session):
        _, page = await session.observe()
        assert page == reads
        for i, title in enumerate(titles):
            await click(session, i)
            assert await session.page.title() == title
    page, reads, titles = MIDDLES[name]
    browse(test, site({"/": page}))


def test_all_of_a_page_that_runs_from_right_to_left_can_be_clicked(site, browse):
    async def test(session):
        await session.observe()
        await click(session, 8)
        assert await session.page.title() == "8"
    cells = "".join(f"<td style='min-width: 300px'><button {TITLE.format(i)}>col {i}</button>" for i in range(9))
    browse(test, site({"/": f"<html dir=rtl><table><tr>{cells}</table>"}))


# ------------------------------------------------------------------------------------------- component libraries

BOX_ROWS = "<style>[role=row] {{ display: {} }}</style>"
CELLS = "<div role=gridcell>{}</div><div role=gridcell>{}</div><div role=gridcell>{}</div>"
LISTENS = "for (const press of ['click', 'pointerdown']) box.addEventListener(press, () => {});"
LIBRARIES = {
    "rows of boxes": (
        BOX_ROWS.format("flex") + "<div role=grid>"
        + "".join(f"<div role=row>{CELLS.format(*row)}</div>" for row in (("Ann", "", "3 May"), ("Bob", "4 May", ""))) + "</div>",
        "Ann | | 3 May\nBob | 4 May |"),
    "rows without a box": (
        "<style>[role=grid] { display: grid; grid-template-columns: auto auto auto } [role=row] { display: contents }</style>"
        f"<div role=grid><div role=row>{CELLS.format(1, 2, 3)}</div><div role=row>{CELLS.format(4, 5, 6)}</div></div>",
        "1 | 2 | 3\n4 | 5 | 6"),
    "a column that is not shown": (
        BOX_ROWS.format("flex") + "<div role=row><div role=gridcell style='display: none'>x</div><div role=gridcell>Ann</div></div>",
        "Ann"),
    "rows that are moved to where they belong": (  # AG Grid
        "<div role=grid><div role=rowgroup>"
        + "".join(f"<div role=row aria-rowindex={i} style='transform: translateY({y}px)'>{text}</div>"
                  for i, y, text in ((2, 0, "Oslo 0"), (10, 20, "Lyon 10"), (3, -20, "Cork 3"))) + "</div></div>",
        "Oslo 0\nCork 3\nLyon 10"),
    "rows of which not all are numbered": (
        "<div role=rowgroup>both <div role=row aria-rowindex=2>b</div><div role=row>a</div></div>", "both\nb\na"),
    "what React draws into": (
        f"<div id=box><h3>Saved</h3><p>2 files</div><script>{LISTENS} box._reactListeningx1 = true; box.onclick = function () {{}}</script>",
        "### Saved\n2 files"),
    "what React draws into and the page hears": (
        f"<div id=box>Saved</div><script>{LISTENS} box._reactListeningx1 = true; box.onclick = () => {{ location = '/' }}</script>",
        "<div>Saved <0></div>"),
    "a group of rows without any": ("<div role=rowgroup>No rows found</div>", "No rows found"),
    "numbered rows below a text": (
        "<div role=rowgroup>1 result<div role=row aria-rowindex=2>Ann</div></div>", "1 result\nAnn"),
    "a grid in a cell": (
        BOX_ROWS.format("flex") + "<div role=row><div role=gridcell>7</div><div role=gridcell>"
        f"<div role=row>{CELLS.format(1, 2, 3)}</div><div role=row>{CELLS.format(4, 5, 6)}</div></div></div>",
        "7 |\n1 | 2 | 3\n4 | 5 | 6"),
    "rows of one cell": (
        "<div role=row><div role=gridcell><div>Ann</div><div>Hello</div></div></div>", "Ann\nHello"),
    "a box that listens": (
        f"<div id=box style='cursor: pointer'>Saved</div><script>{LISTENS}</script>", "<div>Saved <0></div>"),
    "presses that Svelte hears on the document": (
        "<div id=a>Ann</div><div id=b>Bob</div><script>const events = Symbol('events');"
        "a[events] = {mousedown() {}}; b[events] = {keydown() {}}</script>", "<div>Ann <0></div>\nBob"),
    "presses that Solid hears on the document": (
        "<div id=a>Ann</div><script>a.$$pointerdown = () => {}</script>", "<div>Ann <0></div>"),
    "a class for the look of a press": (
        "<style>.ui-active:active { top: 1px }</style><button class=ui-active>Save</button>", "<button>Save <0></button>"),
    "a class for a state that has a look when it is pressed": (
        "<style>.is-active { color: red } .is-active:active { top: 1px }</style><button class=is-active>Save</button>",
        "<button>Save <0> = selected</button>"),
    "attributes for a state": (
        "<button data-selected=true>5</button><button data-selected=false>6</button><button data-checked>7</button>"
        "<button data-selected=true aria-pressed=false>8</button><ul><li data-selected=true><button>9</button></ul>",
        "<button>5 <0> = selected</button> <button>6 <1></button> <button>7 <2></button> <button>8 <3></button>\n"
        "<button>9 <4> = selected</button>"),
    "a text box for reading alone": (
        "<div role=textbox aria-readonly=true aria-label=Code>a = 1</div>"
        "<div role=textbox aria-label=Name aria-placeholder=type>type</div>",
        "<input>Code <0> = a = 1</input> <input>Name <1></input>"),
    "a header that sorts and holds its filter": (
        "<table><tr><th id=box aria-sort=none><div>Name</div><input placeholder=filter><th>Age</table>"
        "<script>box.addEventListener('click', () => {})</script>",
        "<th>Name <0></th> <input>filter <1></input> | Age"),
    # Ant Design: what was chosen lies over the field.
    "a dropdown with a search": (
        "<style>.box { position: relative; width: 200px; height: 30px } .search { position: absolute; inset: 0 }"
        " .search input { width: 100%; height: 100% } .item { position: relative; display: block; line-height: 30px }</style>"
        "<label for=p>Project</label><div class=box><span class=search><input id=p role=combobox></span>"
        "<span class=item>beta</span></div>",
        "<input>Project <0></input>\nbeta"),
    "a button over a field": (
        "<style>.box { position: relative; width: 200px; height: 30px } .box * { position: absolute; inset: 0 }</style>"
        "<label for=p>Project</label><div class=box><input id=p role=combobox><button>clear</button></div>",
        "Project\n<button>clear <0></button>"),
    "a veil over a form": (
        "<form>Wait <input id=p role=combobox aria-label=Project><div style='position: fixed; inset: 0'></div></form>",
        "Wait"),
    # Vuetify: aria-label says what a press does.
    "a dropdown called Open": ("<label for=a>State</label><input id=a aria-label=Open><input aria-label=Close>",
                               "<input>State <0></input> <input>Close <1></input>"),
    # Pikaday and Vuetify.
    "a chosen day": ("<table><tr><td><button>9</button></td><td aria-selected=true><button>10</button></td></tr></table>"
                     "<div class=day--selected><button>10</button></div><div class=day><button>11</button></div>"
                     "<div class=chip--selected>Red <button>x</button></div>",
                     "<button>9 <0></button> | <button>10 <1> = selected</button>\n"
                     "<button>10 <2> = selected</button>\n<button>11 <3></button>\nRed <button>x <4></button>"),
    "a tab that holds a link": (  # Magento
        "<div role=tab aria-selected=true tabindex=0><a tabindex=-1 href='#d'>Details</a></div>"
        "<div role=tab aria-selected=false tabindex=0><a tabindex=-1 href='#r'>Reviews</a></div>",
        "<a>Details <0> = selected</a>\n<a>Reviews <1></a>"),
    "a dropdown for several choices": (  # select2
        "<label for=s>Tags</label><select id=s multiple aria-hidden=true style='position:absolute;clip:rect(0 0 0 0)'><option>red</select>"
        "<span><span role=combobox><ul><li><input type=search></ul><button class=clear><i></i></button></span></span>",
        "Tags\n<input>Tags <0></input>\n<button>clear <1></button>"),
    "a menu in a column's head": (
        "<table><thead><tr><th><input type=checkbox><button>all</button><ul hidden><li>Select All</ul><th>Name</thead>"
        "<tr><td><input type=checkbox><td><input value=A></table>", "<checkbox> <0> = off</checkbox> <button>all <1></button> | Name\n"
        "<checkbox> <2> = off</checkbox> | <input>Name <3> = A</input>"),
    "columns that are sorted": (
        "<table><tr><th class='sortable _ascend' onclick=1 style='cursor: pointer'>ID"
        "<th class='sorting_desc' onclick=1 style='cursor: pointer'>Age"
        "<th class='sort-asc sort-desc' onclick=1 style='cursor: pointer'>Size</table>",
        "<th>ID <0> = ascending</th> | <th>Age <1> = descending</th> | <th>Size <2></th>"),
    "icons of a set": (
        "<style>.fa::before, .mdi::before, .pi::before { content: '\\e000' }</style>"
        "<button class='btn btn-sm'><span class=icon-wrapper><i class='fa fa-xl fa-trash'></i></span></button>"
        "<button class='v-btn v-btn--elevated'><i class='mdi-delete mdi v-icon'></i></button>"
        "<button class=p-button><span class='pi pi-times'></span></button>"
        "<button class=delete-row><i class='fa fa-2x fa-times'></i></button>"
        "<button class=round-full><svg class='icon icon-tabler icon-tabler-pencil'><path d='M0 0h9v9z'/></svg></button>",
        "<button>sm trash <0></button> <button>elevated delete <1></button> <button>times <2></button> "
        "<button>delete times <3></button> <button>round full pencil <4></button>"),
}


def test_how_component_libraries_draw_and_listen(site, browse):
    check(LIBRARIES, site, browse)


# ------------------------------------------------------------------------------------------------- what nobody sees

DRAWER = "<div style='position: fixed; width: 300px; height: 90px; {}'>your cart <button>pay</button></div>"
UNSEEN = {
    "a drawer on the right": ("shop" + DRAWER.format("top: 0; right: -300px"), "shop"),
    "a drawer on the left": ("shop" + DRAWER.format("top: 0; left: -300px"), "shop"),
    "a drawer moved away": ("shop" + DRAWER.format("top: 0; right: 0; transform: translateX(100%)"), "shop"),
    "a message above": ("shop" + DRAWER.format("top: -90px; left: 0"), "shop"),
    "a message below": ("shop" + DRAWER.format("bottom: -90px; left: 0"), "shop"),
    "an open drawer": ("shop" + DRAWER.format("top: 40px; right: 0"), "shop\nyour cart <button>pay <0></button>"),
    # Fixed in a box that is transformed, it scrolls with the page.
    "fixed to a box": ("<div style='transform: translateX(0); margin-top: 900px'>shop" + DRAWER.format("top: 40px") + "</div>",
                       "shop\nyour cart <button>pay <0></button>"),
    "a panel that scrolls": ("<div style='position: fixed; inset: 0 0 auto 0; height: 90px; overflow: auto'>"
                             "<p style='height: 2000px'>far<p><a href=/>away</a></div>", "far\n<a>away <0></a>"),
    "fixed in a frame": ("shop<iframe style='height: 200px' srcdoc='<p style=\"position: fixed; bottom: 0\">foot'></iframe>",
                         "shop\nfoot"),
    "nothing": ("<!doctype html><img alt=''>", "[this page is empty]"),
    "a message that has gone": ("shop<p style='opacity: 0'>Saved!</p>", "shop"),
    "a text that comes when the page is scrolled": ("shop<p style='margin-top: 900px; opacity: 0'>soon</p>", "shop\nsoon"),
    "a link for those who press Tab": ("<a href=/ style='position: absolute; left: -9999px'>Skip</a>shop", "shop"),
    "a drawer that moves with the page": ("<div style='position: absolute; left: -300px; width: 280px'><a href=/>home</a></div>shop",
                                          "shop"),
    "a card on what dims the page": ("<style>body { margin: 0 }</style><p>shop<div style='position: fixed; inset: 0; background: gray'>"
                                     "</div><div style='position: relative; width: 280px; margin: 200px auto'><button>Sign in</button></div>",
                                     BEHIND + "\n<button>Sign in <0></button>"),
    "a dialog in a shadow root": (
        "<a href=/>shop</a><x-box></x-box><script>const root = document.querySelector('x-box').attachShadow({mode: 'open'});"
        "root.innerHTML = '<dialog>sure? <button>yes</button></dialog>'; root.querySelector('dialog').showModal()</script>",
        BEHIND + "\nsure? <button>yes <0></button>"),
    "a link that the mouse does not hit": ("<a href=/ style='pointer-events: none'>next</a>", "next"),
    "a switch that the mouse hits on its label": ("<label><input type=checkbox style='pointer-events: none'>mail</label>",
                                                  "<checkbox>mail <0> = off</checkbox>"),
}


def test_what_nobody_sees_or_can_reach_is_left_out(site, browse):
    check(UNSEEN, site, browse)


def test_a_picture_as_a_page_of_its_own_shows_its_text(site, browse):
    async def test(session):
        assert (await session.observe())[1] == "sales of May"
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><text y='20'>sales of May</text></svg>"
    browse(test, site({"/": lambda request: answer(request, svg, **{"Content-Type": "image/svg+xml"})}))
