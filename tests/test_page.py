"""Pages as the agent reads them (worlds/page/): small pages in a real Chromium, and their observations."""
import re
import time
from urllib.parse import quote

import pytest
from conftest import act, execute

from rollout import Call
from worlds.browser import ActionError, BrowserSettings, Session

BOXES = """<title>t</title>
<style>body * { position: absolute; margin: 0; border: 0; padding: 0; width: 100px; height: 20px }</style>
<div style="width:600px;height:100px"><h1>Sign in</h1><form data-testid=login style="top:30px;width:500px">
<label>Name</label> <input title=required value=ann style="left:110px">
<input type=checkbox value=1 style="left:220px">
<select aria-label=size style="left:330px"><option value=a selected>Small</option>
<option value=b>Large & up</option></select></form></div>
<div style="top:200px"><div><a href=/x>&lt;a id="7"> & co</a></div></div>
<p style="top:300px">Items <b style="left:50px">12</b> of <b style="left:120px">40</b></p>
<div style="top:-50px;height:50px"><button style="top:400px">up</button></div>
<details style="top:500px"><summary>more</summary><a href=/x style="top:20px">closed</a></details>
<div style="top:4000px"><a href=/x>far</a></div>"""
BOXES_TEXT = """title: t
# Sign in
Name
<input>required <0> = ann</input> <checkbox> <1> = off</checkbox> \
<select>size <2> = Small (Small | Large &amp; up)</select>
<a>&lt;a id="7"&gt; &amp; co <3></a>
Items
12
of
40
<button>up <4></button>
<summary>more <5></summary>
<a>far <6></a>"""


@pytest.mark.parametrize("viewport_only", [False, True])
def test_viewport_only_hides_only_what_is_outside_the_window(site, browse, viewport_only):
    """Elements are placed far from their parents, so each counts by its own box."""
    async def test(session):
        far = "\n<a>far <6></a>"
        assert (await session.observe())[1] == (BOXES_TEXT.replace(far, "") if viewport_only else BOXES_TEXT)
        with pytest.raises(ActionError, match="no element 7"):  # which the page claims to have
            await execute(session, 'do(action="Click", element="7")')
    browse(test, site({"/": BOXES}), BrowserSettings(viewport_only=viewport_only))


CARD = "<a href=/x><div><h3>Lamp</h3>$ 9</div></a>"
HIDING = ("contains", "matches", "nodeType", "shadowRoot", "parentElement", "childNodes")
MANY = "words " * 99 + "words"
LONG = f"<h2>News</h2><p>{MANY}</p><p>the end</p>"
LISTEN = "<script>root.addEventListener('click', event => document.title = event.target.textContent)</script>"
ICON = "<style>i{display:inline-block;width:9px;height:9px}</style>"
BEHIND = "[the page behind this dialog is left out]"
READ = {  # how real pages are built -> what the agent reads
    "links around blocks": (f"{CARD}<a href=/x><img alt=pic style='float:left;width:9px;height:9px'></a>",
                            "<a>Lamp $ 9 <0></a> <a>pic <1></a>"),
    "closed within": ("<div onclick=1>Shipping<div hidden><button>x</button></div></div>"
                      "<li role=menuitem>File<ul style='display:none'><li role=menuitem>Open</ul>",
                      "<div>Shipping <0></div> <li>File <1></li>"),
    "controls styled away": ("<style>input{display:none}</style><label><input type=radio checked>Small"
                             "</label><input type=checkbox id=k><label for=k>Keep</label>",
                             "<radio>Small <0> = on</radio> <checkbox>Keep <1> = off</checkbox>"),
    "a list in a panel": ("<div style='height:50px;overflow:auto'><p><a href=/x>one</a><p><a href=/x>two</a>"
                          "<p><a href=/x>three</a></div><div style='height:300px'>below</div>",
                          "<a>one <0></a>\n<a>two <1></a>\n<a>three <2></a>\nbelow"),
    "parts of a word": ("<p>$<span>24</span>.<sup>99</sup></p><p>order <b>#12</b>-<b>34</b> hel<wbr>lo</p>"
                        "<b style='margin:2px'>New</b>Lamp", "$24.99\norder #12-34 hello\nNew Lamp"),
    "a title of texts far above a field": (
        "<div><div>Order summary</div><div><p>Total: 12 kr<p>Ships on Monday</div><div><input></div></div>",
        "Order summary\nTotal: 12 kr\nShips on Monday\n<input> <0></input>"),
    "a name above a field, with a hint between": (
        "<div><div>Quantity</div><small>12 at most</small><div><input></div></div>", "12 at most\n<input>Quantity <0></input>"),
    "a name above a field, with a hint of several pieces": (
        "<div><div>Phone</div><p>Use <b>8</b> or <b>more</b> digits</p><div><input></div></div>",
        "Use 8 or more digits\n<input>Phone <0></input>"),
    "a label that is tied to no field, with hints between": (
        "<div><label>Password</label><p>8 characters<p>one digit<p>no space<div><input type=password></div></div>",
        "8 characters\none digit\nno space\n<input>Password <0></input>"),
    "texts before boxes, which name the group": (
        "<p>Gender: <input type=radio name=g> Male <input type=radio name=g> Female</p>",
        "Gender: <radio>g <0> = off</radio> Male <radio>g <1> = off</radio> Female"),
    "a field beside a switch with a name of its own": (
        "<div><span>Amount</span> <input> <div role=switch aria-label=Recurring tabindex=0 style='display:inline-block;width:9px;height:9px'>"
        "</div></div>", "<input>Amount <0></input> <checkbox>Recurring <1> = off</checkbox>"),
    "a drawn box whose input is parked in it": (
        "<div><div role=checkbox style='width:20px;height:20px;cursor:pointer'><div style='position:absolute;width:1px;height:1px;"
        "overflow:hidden'><input type=checkbox></div></div><span>New York</span></div>", "<checkbox>New York <0> = off</checkbox>"),
    "a disabled box whose input is hidden": (
        "<div><div role=checkbox aria-disabled=true style='width:20px;height:20px'><input type=checkbox hidden></div>Gift wrap</div>",
        "Gift wrap"),
    "a branch that is disabled, and its leaf": (
        "<ul><li role=treeitem aria-disabled=true>dist<ul role=group><li role=treeitem tabindex=0>a.js</ul></ul>",
        "dist\n<li>a.js <0></li>"),
    "a choice that is disabled, and the button in it": (
        "<div role=option aria-disabled=true>Pro <span role=button tabindex=0>Upgrade</span></div>"
        "<div role=option aria-disabled=true><img alt='Red shoe'> sold out</div><div role=option aria-disabled=true></div>",
        "Pro <button>Upgrade <0></button> (disabled)\nRed shoe sold out (disabled)"),
    "focus on elements whose role says nothing": (
        "<span role=none tabindex=0>chip</span> <b role=presentation tabindex=0 class=zoom><svg width=9 height=9></svg></b>"
        "<div role=option aria-disabled=true><span role=link aria-disabled=true>gone</span></div><div role=separator tabindex=0 aria-valuenow=30 aria-label=split style='height:9px'></div>",
        "<span>chip <0></span> <b>zoom <1></b>\ngone (disabled)\n<div>split <2> = 30</div>"),
    "a text right before a field": (
        "<p>Date: <input name=on_0> <a href=/>Today</a><br>Time: <input name=on_1></p>",
        "Date: <input>Date <0></input> <a>Today <1></a>\nTime: <input>Time <2></input>"),
    "a word of an icon font that is pressed": (
        "<style>.material-icons{font-family:'Material Icons'}</style><label>Date <input></label>"
        "<i class=material-icons aria-hidden=true style='cursor:pointer' onclick=1>event</i>",
        "<input>Date <0></input> <i>event <1></i>"),
    "boxes drawn around a hidden one, named by their rows": (
        "".join(f"<table><tr><td><div class='box pointer' role=checkbox aria-checked={on} tabindex=0><input type=checkbox hidden>"
                f"<svg width=9 height=9></svg></div><td>{name}</table>" for name, on in (("Ann", "true"), ("Ben", "false"))),
        "<checkbox>Ann <0> = on</checkbox> | Ann\n<checkbox>Ben <1> = off</checkbox> | Ben"),
    "boxes drawn in one row, whose names stand beside them": (
        "<p><span role=checkbox class=sea tabindex=0><svg width=9 height=9></svg></span> red</p><p>"
        "<span role=checkbox class=sky tabindex=0><svg width=9 height=9></svg></span> blue "
        "<span role=checkbox class=one tabindex=0><svg width=9 height=9></svg></span></p>",
        "<checkbox>red <0> = off</checkbox>\n<checkbox>sky <1> = off</checkbox> blue <checkbox>one <2> = off</checkbox>"),
    "a drawn menu with a line and an item that is disabled": (
        "<style>li{height:20px}</style><ul><li tabindex=0 role=menuitem>Open<li tabindex=0 role=presentation class=line><div></div>"
        "<li tabindex=0 role=menuitem aria-disabled=true>Save</ul>", "<li>Open <0></li>\nSave (disabled)"),
    "a dropdown drawn after one that it hides": (
        "<style>.off{position:absolute;width:1px;height:1px;overflow:hidden;clip:rect(0 0 0 0)}</style><label for=c>Category</label> "
        "<select id=c class=off aria-hidden=true tabindex=-1><option></select><span><span class=selection role=combobox tabindex=0 "
        "style='display:inline-block;width:99px;height:20px'></span></span>", "Category <span>Category <0></span>"),
    "sliders that show what they stand at": (
        "<div role=slider tabindex=0 aria-valuenow=30 style='width:99px;height:9px'>30</div>"
        "<label>Size <input type=range max=2 value=0 aria-valuetext=S></label>"
        "<p><label>Loss <input type=range value=3 aria-valuetext=13%></label> <label>Page <input type=range value=3 aria-valuetext='3 of 9'></label>",
        "<input> <0> = 30</input> <input>Size <1> = 0 (S)</input>\n<input>Loss <2> = 3 (13%)</input> <input>Page <3> = 3</input>"),
    "cells that span several": (
        "<table><tr><th>Day<th>9:00<th>10:00<th>11:00<tr><th>Mon<td colspan=2>Busy<td>Free"
        "<tr><td rowspan=2>Tue<td>a<td>b<td>c<tr><td>d<td>e<td>f<tr><td rowspan=0>Wed<td>g</table>",
        "Day | 9:00 | 10:00 | 11:00\nMon | Busy | | Free\nTue | a | b | c\n| d | e | f\nWed | g"),
    "cells that claim more than there is, and hidden ones": (
        "<table><tr><td>a<td>b<td>c<tr><td>T<td colspan=99>long<td>z</table>"
        "<table><tr><td>M<td colspan=2 style='display:none'>h<td>q</table>"
        "<table><tr><td>M<td colspan=2>busy<td style='display:none'><td>q</table>",
        "a | b | c\nT | long | | | z\nM | q\nM | busy | | q"),
    "checkboxes in cells that span several": (
        "<table><thead><tr><th rowspan=9>Tool<th colspan=2>Mon<th>Tue<tr><th>AM<th>PM<th>AM</thead><tr><td rowspan=2>saw"
        "<td><input type=checkbox><td><input type=checkbox><td><input type=checkbox><tr><td><input type=checkbox><td>"
        "<input type=checkbox><td><input type=checkbox></table>",
        "Tool | Mon | | Tue\n| AM | PM | AM\nsaw | <checkbox>Mon AM <0> = off</checkbox> | <checkbox>Mon PM <1> = off</checkbox>"
        " | <checkbox>Tue AM <2> = off</checkbox>\n| <checkbox>Mon AM <3> = off</checkbox> | "
        "<checkbox>Mon PM <4> = off</checkbox> | <checkbox>Tue AM <5> = off</checkbox>"),
    "a small number above the line": (
        "<p>$12<sup style='vertical-align:baseline'>99</sup> 10<sup>6</sup> m<sup>2</sup> 1<sup>st</sup> 5<sub>2</sub></p><button><b>9</b><sup>90</sup></button>",
        "$12 99 10 6 m2 1st 52\n<button>9 90 <0></button>"),
    "editors with and without a label": (
        "<b id=l>Note</b> <div contenteditable role=textbox aria-labelledby=l>call Bo</div><div contenteditable "
        "style='text-transform:uppercase'>free</div><div contenteditable aria-label='Item 12'>1</div>",
        "Note <input>Note <0> = call Bo</input> <div>free <1></div> <div>Item 12 <2> = 1</div>"),
    "links in a label": ("<label><input type=checkbox>I accept the <a href=/x>terms</a></label>",
                         "<checkbox>I accept the terms <0> = off</checkbox> <a>terms <1></a>"),
    "locked fields": ("<label>Total <input disabled value='$42'></label>"
                      "<fieldset disabled><a href=/x>why</a><input name=n value=3></fieldset>",
                      "Total = $42 (disabled)\n<a>why <0></a> n = 3 (disabled)"),
    "handlers and names": ("<p id=p>prop</p><script>p.onclick = () => 1</script>"
                           "<div contenteditable aria-label=Body>so far</div>"
                           "<button><svg width=9 height=9><title>Close</title></svg></button>",
                           "<p>prop <0></p> <div>Body <1> = so far</div> <button>Close <2></button>"),
    "fields that hide a form": (
        "<form>" + "".join(f"<input name={name}>" for name in HIDING) + "</form><img name=body>"
        "<a href=/x>on</a>",
        " ".join(f"<input>{name} <{i}></input>" for i, name in enumerate(HIDING)) + " <a>on <6></a>"),
    "headings that end with a number": ("<h1>Book</h1><h3>Chapter 3</h3><h2><a href=/x>Order 17</a></h2>",
                                        "# Book\n### Chapter 3\n## <a>Order 17 <0></a>"),
    "a long text that listens": (f"<div id=root>{LONG}</div><a href=/x>on</a>{LISTEN}",
                                 f"## <div>News <0></div>\n{MANY}\nthe end\n<a>on <1></a>"),
    "a long link": (f"see <a href=/x>{LONG}</a>", f"see\n## <a>News <0></a>\n{MANY}\nthe end"),
    "a root that listens for its buttons": (
        f"<div id=root><div id=save>Save</div><div id=undo>Undo</div></div>{LISTEN}"
        "<script>save.onclick = undo.onclick = () => 1</script>", "<div>Save <0></div> <div>Undo <1></div>"),
    "a table and a list that listen": (
        "<table id=root><thead><tr><th>Name<th>Age</thead><tr><td>Ann<td>24<tr><td>Bob<td><a href=/x>25</a>"
        f"</table><ul onclick=1><li>one<li>two</ul>{LISTEN}",
        "Name | Age\n<tr>Ann | 24 <0></tr>\nBob | <a>25 <1></a>\n<li>one <2></li> <li>two <3></li>"),
    "what nobody sees": (
        "<details>bare <summary>more</summary> text <p>p</details><p hidden=until-found>folded</p>"
        "<div style='height:0;overflow:hidden'>flat <a href=/x>x</a>"
        "<p style='position:fixed;top:9em'>dialog</div>"
        "<style>b input{opacity:0;width:0;height:0}</style><b><label><input type=checkbox>Dark</label></b>",
        "<summary>more <0></summary>\ndialog\n<checkbox>Dark <1> = off</checkbox>"),
    "long and multiple selects": (
        f"<select>{''.join(f'<option>{i}' for i in range(99))}</select><select multiple><option selected>a"
        "<option>b<option selected>c</select>",
        f"<select> <0> = 0 ({' | '.join(map(str, range(60)))} | ... 39 more)</select> "
        "<select> <1> = a | c (a | b | c)</select>"),
    "pictures": (
        f"{ICON}<a href=/1><i aria-label=Edit></i></a> <a href=/2><i title=comments></i>46</a> "
        "<a href=/3><i class='fa fa-left'></i></a> <a href=/page/2><i></i>&#xe001;</a><a href=/4 class=bold>"
        "<i class=x></i></a><p class='star-rating Two'><i class='fas star'></i><i class='fas star'></i></p>"
        "<i role=img aria-label='4 of 5'></i><nav aria-label=Empty></nav>",
        "<a>Edit <0></a> <a>46 comments <1></a> <a>left <2></a> <a>/page/2 <3></a> <a>bold <4></a>\n"
        "star-rating Two fas star fas star\n4 of 5"),
    "states": (
        "<button aria-expanded=true>Menu</button><button aria-expanded=false>File</button>"
        "<div role=tab aria-selected=true>Tab</div>"
        "<b role=button aria-pressed=true>B</b><a href=/ aria-current=page>Home</a>"
        "<button role=switch aria-checked=true>Dark</button>",
        "<button>Menu <0> = expanded</button> <button>File <1></button> <div>Tab <2> = selected</div> "
        "<button>B <3> = pressed</button> <a>Home <4> = current</a> <checkbox>Dark <5> = on</checkbox>"),
    "an image and a title": (
        "<a href=/1><img alt='Red lamp'></a><h3><a href=/1>Red lamp</a></h3>"
        "<a href=/2><img class=pic></a><h3><a href=/2>Blue lamp</a></h3>"
        "<a href=/3><img alt='A long name'></a><a href=/3>A long...</a>"
        "<a href=/4>a</a> <a href=/4>a</a> <a href=#><img></a><a href=#><img></a>"
        "<style>img{height:9px;width:9px}</style>",
        "<a>Red lamp <0></a>\n<a>Blue lamp <1></a>\n<a>A long name <2></a> <a>a <3></a> <a>a <4></a> <a># <5></a> "
        "<a># <6></a>"),
    "parts that look clickable in a container that listens": (
        "<style>.day,.row{cursor:pointer}</style><div id=root><table><tr><th>Mon<th>Tue<tr><td class=day>"
        "<p>24</p><td class=day>25</table></div>"
        "<div onclick=1><b tabindex=0>Food</b> <b class=day>9</b></div>"
        f"<div class=row>one <b>row</b></div>{LISTEN}"
        "<div role=checkbox aria-checked=true>Dark <b class=day>mode</b></div>",
        "Mon | Tue\n<td>24 <0></td> | <td>25 <1></td>\n<b>Food <2></b> <b>9 <3></b>\n<div>one row <4></div> "
        "<checkbox>Dark mode <5> = on</checkbox>"),
    "a window onto one of several slides": (
        "<style>.window{overflow:hidden;width:200px}.slides{display:flex;transform:translateX(-200px)}"
        ".slides>*{flex:none;width:200px}.quiet{position:absolute;width:1px;height:1px;overflow:hidden;line-height:3}"
        ".out{position:absolute;left:400px}input{position:absolute;left:-999px}</style><div class=window>"
        "<div class=slides><p>May <a href=/5>5</a></p><p>June <a href=/6>6</a></p>"
        "<p>July <a href=/7>7</a></p></div><b class=out>a menu</b>"
        "<div style='position:relative'><b class=out>cut</b></div>"
        "<div style='height:20px;overflow:auto'><p>here</p><p>further down</p></div></div>"
        "<label class=window style='display:block;position:relative'><input type=checkbox>Dark</label>"
        "<b class=quiet>for the blind</b>",
        "June <a>6 <0></a>\na menu\nhere\nfurther down\n<checkbox>Dark <1> = off</checkbox>\n"
        "for the blind"),
    "a dialog over the page": (
        "<p>Budget <a href=/x>one</a></p><p style='margin-top:2000px'>far <a href=/x>two</a></p>"
        "<div style='position:fixed;inset:0;background:#aaa'></div><div role=dialog style='position:fixed;"
        "top:9px;background:#fff'><a href=/x>Create</a></div>", f"{BEHIND}\n<a>Create <0></a>"),
    "an editor": (
        "<i id=ph>Write here</i><div class=Editor role=textbox contenteditable aria-describedby=ph "
        "style='height:40px'></div>", "Write here <input>Write here <0></input>"),
    "names that programs make up": (
        "<div data-testid=notes><b class=css-1p1oehi onclick=1></b></div><button id=aria829-_r_1_></button>"
        "<button class='x8190 close'></button>"
        "<style>b{display:block;height:9px}</style>",
        "<b>notes <0></b>\n<button> <1></button> <button>close <2></button>"),
    "labels that a control is not called by": (
        "<label for=q>City</label><input id=q><label for=q>This field is required.</label>"
        "<p><label for=z>Quantity (max 5)</label><input id=z aria-label=qty></p>"
        "<p><label for=f>Upload a file</label><input id=f type=file style='opacity:0;width:0;height:0'></p>"
        "<p><label id=l for=m>Size</label><input id=m aria-labelledby=l></p>"
        "<label><input type=radio name=c><img alt=Red></label><label><input type=radio name=c><img alt=Blue></label>",
        "<input>City <0></input> This field is required.\nQuantity (max 5) <input>qty <1></input>\nUpload a file\n"
        "<input>Size <2></input>\n<radio>Red <3> = off</radio> <radio>Blue <4> = off</radio>"),
    "cells that are empty or hold blocks": (
        "<table><tr><th></th><th>Mon<th>Tue<tr><td>8h<td></td><td>gym<tr><td><div>Lamp</div><p>new</p><td>"
        "<div><a href=/x>3</a><br>left</div><tr><td></td><td></td><tr><td hidden>7</td><td>seen</table>",
        "| Mon | Tue\n8h | | gym\nLamp new | <a>3 <0></a> left\nseen"),
    "visible within invisible": ("<div style='visibility:hidden'>out <b style='visibility:visible'>in "
                                 "<a href=/x>go</a></b><iframe srcdoc=out></iframe></div>", "in <a>go <0></a>"),
    "text with lines of its own": ("<pre>def f():\n  return 1\n\n<b># two</b>\nend</pre><p>one\nline</p>",
                                   "def f():\nreturn 1\n# two\nend\none line"),
    "what old browsers show": ("<canvas>old</canvas><video>old</video><object data=x.pdf>no reader</object>",
                               "no reader"),
    "an option in a group that is off": (
        "<select><option label=Shown value=1>hidden</option><optgroup disabled><option>off</optgroup></select>",
        "<select> <0> = Shown (Shown | off (disabled))</select>"),
    "what is cut": (f"<input value='{'v' * 501}'>", f"<input> <0> = {'v' * 500}…</input>"),
    "a deep page": (
        "<a href=/x>top</a><p id=hole></p><a href=/x>after</a><script>for (let i = 0, at = hole; i < 1500; i++)"
        "at = at.appendChild(document.createElement('div'))</script>", "<a>top <0></a>\n<a>after <1></a>"),
    "a hint in an empty editor": (
        "<style>.empty::before{content:attr(data-hint)}.note::before{content:''}</style><div contenteditable class=note>"
        "<p class=empty data-hint='Write something'><br></div>", "<div>Write something <0></div>"),
    "a form that stands in for the document's host": (
        "<form name=host><input aria-label=city></form><div><template shadowrootmode=open><a href=/x>in</a></template></div>",
        "<input>city <0></input>\n<a>in <1></a>"),
    "empty editors in frames": (
        "<iframe title=Text srcdoc='<body contenteditable>'></iframe><iframe srcdoc='<body contenteditable>'></iframe>",
        "<body>Text <0></body> <body> <1></body>"),
    "labels that look usable": ("<label style='cursor:pointer'>Gift <input type=checkbox aria-label=wrap></label>",
                                "Gift <checkbox>wrap <0> = off</checkbox>"),
    "nothing chosen": ("<select multiple><option>a<option>b</select>", "<select> <0> = (a | b)</select>"),
    "texts at the top of a shadow root": (
        "<shop-app><template shadowrootmode=open>\n<style>b{}</style> Shop\n<button>Buy</button></template></shop-app>",
        "Shop <button>Buy <0></button>"),
    "what stands in slots": (
        "<div><template shadowrootmode=open><button><slot></slot></button></template>Cancel</div>"
        "<div><template shadowrootmode=open><a href=/x><slot></slot></a></template><b>More</b></div>",
        "<button>Cancel <0></button>\n<a>More <1></a>"),
    "a component that listens around its controls": (
        "<div id=x><template shadowrootmode=open><b>Login</b><button>Done</button><input aria-label=Note></template></div>"
        "<script>x.addEventListener('click', () => 0)</script>"
        "<div onclick=1>Card <p><span><template shadowrootmode=open><button>Open</button></template></span></p></div>",
        "Login <button>Done <0></button> <input>Note <1></input>\nCard\n<button>Open <2></button>"),
    "rows that say what they are": (
        "<ul role=listbox><li role=option aria-selected=true>Ann <button>Delete</button></ul>"
        "<div tabindex=0 onclick=1>Card <button>Move</button></div><div tabindex=0>Area <button>Go</button></div>",
        "<li>Ann <0> = selected</li> <button>Delete <1></button>\n<div>Card <2></div> <button>Move <3></button>\n"
        "Area <button>Go <4></button>"),
    "parts of a menu that listens": (
        "<div onclick=1><p data-action=open>Open</p><p data-action=drop>Drop</p></div>"
        "<div onclick=1><p data-v-1>Ann</p><p data-v-1>Vik</p></div><div onclick=1><p data-id=7>Alone</p></div>"
        "<div><p data-id=8>no</p><p data-id=9>listener</p></div>",
        "<p>Open <0></p> <p>Drop <1></p>\n<div>Ann Vik <2></div> <div>Alone <3></div>\nno\nlistener"),
    "days of which the keys reach one": (
        "<table role=grid onclick=1><tr><td role=gridcell tabindex=0>3<td role=gridcell tabindex=-1>4</table>"
        "<table role=grid><tr><td role=gridcell tabindex=-1>a<td role=gridcell tabindex=-1>b</table>",
        "<td>3 <0></td> | <td>4 <1></td>\na | b"),
    "listeners of every kind": (
        "<p onmousedown=1>Paris</p><p id=p>Parma</p><script>p.onpointerdown = () => 1</script>",
        "<p>Paris <0></p> <p>Parma <1></p>"),
    "links in the label of a box that is styled away": (
        "<label><input type=checkbox hidden>I accept the <a href=/x>terms</a></label>"
        "<input id=milk type=checkbox style='display:none'><label for=milk>Buy milk <button>x</button></label>",
        "<checkbox>I accept the terms <0> = off</checkbox> <a>terms <1></a> "
        "<checkbox>Buy milk <2> = off</checkbox> <button>x <3></button>"),
    "text beside a control that nobody sees": (
        "<div>Weekly report <input type=checkbox style='visibility:hidden'></div>"
        "<div>Plan: <select style='visibility:hidden'><option>x</select></div>"
        "<div>Shown <input type=checkbox style='opacity:0;pointer-events:none'></div>"
        "<div style='opacity:0;pointer-events:none'><input aria-label=find></div>",
        "Weekly report\nPlan:\nShown"),
    "a table and sections that listen": (
        "<div onclick=1><table><tr><th>Who<th>Mon<th>Tue<tr><td>Ann<td><td>2</table></div>"
        "<div onclick=1><h3>To do</h3>milk<h3>Done</h3>bread</div><div onclick=1><h3>Lamp</h3>new</div>",
        "<div>Who | Mon | Tue <0></div>\nAnn | | 2\n### <div>To do <1></div>\nmilk\n### Done\nbread\n<div>Lamp new <2></div>"),
    "what has no box of its own": (
        "<p style='display:contents'>direct text</p><span style='display:contents'><b>nested</b> tail</span>"
        "<div><p style='display:contents;visibility:hidden'>hidden</p><b style='opacity:0'><i style='display:contents'>faded"
        "</i></b></div><div><input type=checkbox> <span style='display:contents'>beside</span></div><div><template "
        "shadowrootmode=open><p>head <slot>fallback</slot></p></template></div>",
        "direct text nested tail\n<checkbox>beside <0> = off</checkbox>\nhead fallback"),
    "what the keys reach to scroll it or to have it read aloud": (
        "<style>[tabindex]{overflow:auto;height:40px}</style><div role=tabpanel tabindex=0 aria-label=Status>shipped</div>"
        "<section tabindex=0 aria-label=Terms>free<p>until noon</p></section><pre tabindex=0>a\nb</pre>"
        "<div tabindex=0 aria-label=Chat><p>hi</p><p>ho</p><p>hey</p></div><div role=button tabindex=0>Go</div>"
        "<article tabindex=0 onclick=1>Post</article>",
        "shipped\nfree\nuntil noon\na\nb\nhi\nho\nhey\n<button>Go <0></button> <article>Post <1></article>"),
    "a label of what is not written": (
        "<label for=s>Country</label><select id=s aria-hidden=true style='position:absolute;clip:rect(0 0 0 0)'><option>USA</select>"
        "<span role=combobox tabindex=0>USA</span><p><label>Upload <progress value=3 max=9></progress></label></p>"
        "<p><label for=c>Code</label> <span style='position:relative'><input id=c><b style='position:absolute;inset:0'></b></span></p>"
        "<p><label for=h>Shown</label><input id=h aria-hidden=true></p><p inert><label>Locked <input></label></p>",
        "Country <span>USA <0></span>\nUpload 3 of 9\nCode\nShown\nLocked (disabled)"),
    "a summary with controls of its own": (
        "<details open><summary>Order 12 <button>Delete</button> <input type=checkbox aria-label=pick></summary>rye</details>"
        "<details><summary><label><input type=checkbox>tick</label> Order 13 <a href=/x>open</a></summary></details>",
        "<summary>Order 12 <0></summary> <button>Delete <1></button> <checkbox>pick <2> = off</checkbox>\nrye\n"
        "<checkbox>tick <3> = off</checkbox> <summary>Order 13 <4></summary> <a>open <5></a>"),
    "a summary that is all link or all label": (
        "<details><summary><a href=#faq>What is rye?</a></summary>grain</details>"
        "<details><summary><label><input type=checkbox>Spelt</label></summary>grain</details>",
        "<summary>What is rye? <0></summary>\n<summary>Spelt <1></summary>"),
    "a region that scrolls and is a list or navigation": (
        "<div role=list tabindex=0 style='height:30px;overflow:auto'><p role=listitem>one<p role=listitem>two</div>"
        "<div role=listbox tabindex=0 style='height:30px;overflow:auto'><p role=option>a<p role=option>b</div>",
        "one\ntwo\n<p>a <0></p> <p>b <1></p>"),
    "a row called by a label of something else": (
        "<div tabindex=0 onclick=1><label for=c>Milk order</label> <input id=c aria-label='Select row'></div>",
        "<div>Milk order <0></div> <input>Select row <1></input>"),
    "a label that is too long for a name": (
        f"<label><input type=checkbox>{'I agree. ' * 40}The end.</label>",
        f"<checkbox>{('I agree. ' * 34)[:300]}… <0> = off</checkbox> {'I agree. ' * 40}The end."),
    "a select with a button that draws it": (
        "<style>select{appearance:base-select}</style><label>Pet <select><button>cat</button><option>cat<option>dog</select></label>",
        "<select>Pet <0> = cat (cat | dog)</select>"),
    "a custom element whose state is inside": (
        """<x-check aria-label=Agree tabindex=0 style="display:inline-block;width:20px;height:20px"></x-check> <x-field aria-label=Name></x-field><script>
        customElements.define('x-check', class extends HTMLElement {
          constructor() { super(); this.checked = true; this.attachInternals().role = 'checkbox'; }
          connectedCallback() { this.onclick = () => this.checked = !this.checked; }
        });
        customElements.define('x-field', class extends HTMLElement {
          static formAssociated = true;
          constructor() { super(); this.attachShadow({mode: 'open'}).innerHTML = '<input>'; }
        });</script>""",
        "<checkbox>Agree <0> = on</checkbox> <input>Name <1></input>"),
    "a custom button with a state of its own": (
        """<x-bold tabindex=0 onclick="1">Bold</x-bold><script>customElements.define('x-bold', class extends HTMLElement {
          constructor() { super(); this.attachInternals().states.add('pressed'); }
        });</script>""",
        "<x-bold>Bold <0> = pressed</x-bold>"),
    "a custom item that has a state and is no checkbox": (
        """<x-item tabindex=0 onclick="1">Copy</x-item><script>customElements.define('x-item', class extends HTMLElement {
          constructor() { super(); this.checked = false; }
        });</script>""",
        "<x-item>Copy <0></x-item>"),
    "two fields in one custom element": (
        """<x-range aria-label=Price></x-range><script>customElements.define('x-range', class extends HTMLElement {
          static formAssociated = true;
          constructor() {
            super();
            this.attachShadow({mode: 'open'}).innerHTML = '<input aria-label=min><input placeholder=max>';
          }
        });</script>""",
        "<input>min <0></input> <input>max <1></input>"),
    "properties that throw": (
        """<x-check-1 tabindex=0 onclick="1">odd</x-check-1> <div role=textbox tabindex=0 onclick="1">odder</div> <button>save</button><script>
        customElements.define('x-check-1', class extends HTMLElement {
          get checked() { throw new Error('not yet'); }
        });
        Object.defineProperty(document.querySelector('[role=textbox]'), 'editContext', {get() { throw new TypeError('no'); }});
        </script>""",
        "<x-check-1>odd <0></x-check-1> <input>odder <1></input> <button>save <2></button>"),
    "unread among the unselected": (
        "<style>.unread{font-weight:bold}</style><div role=option tabindex=0 class=unread aria-selected=false>Ann</div>",
        "<div>Ann <0> = unread</div>"),
}


def test_real_pages_are_read(site, browse):
    async def test(session):
        for name, (_, text) in READ.items():
            await session.page.goto(f"{base}/{quote(name)}")
            assert (await session.observe())[1] == text, name
    base = site({f"/{quote(name)}": page for name, (page, _) in READ.items()} | {"/": "start"})
    browse(test, base)


def test_fifty_thousand_elements_are_read_within_the_cap(site, browse):
    async def test(session):
        text = (await session.observe())[1]
        assert text.startswith("<a>link 0 of many <0></a>\n<a>link 1")
        assert 200_000 < len(text) < 200_100 and text.endswith("[the page goes on]")
    many = "".join(f"<p><a href=/{'x' * 50}{i}>link {i} of many</a>" for i in range(50_000))
    browse(test, site({"/": many}), BrowserSettings(timeout=120))


def test_many_fields_without_labels_are_read_in_time(site, browse):
    """For its name each field once read all texts of the list: 400 rows took 5 seconds."""
    async def test(session):
        _, text = await session.observe()
        assert "row 1499" in text
    row = """<div style="cursor:pointer"><div class=check></div><div onclick="1">row {}<div><b>more</b></div></div>
        <input placeholder=x></div>"""
    rows = "".join(row.format(i) for i in range(1500))
    browse(test, site({"/": f"<div style='cursor:pointer'>{rows}</div>"}), BrowserSettings(timeout=40))


def test_covered_elements_are_out_and_a_page_is_capped(site, browse):
    async def test(session):
        text = (await session.observe())[1]
        assert "below" not in text and "above" in text
        assert len(text) < 700 and text.endswith("[the page goes on]")
    stack = ('<div style="position:relative"><a href=x>below</a>'
             '<div style="position:absolute;inset:0;background:red"><a href=y>above</a></div></div>')
    browse(test, site({"/": stack + "<p>word</p>" * 5000}), BrowserSettings(max_page_chars=500))


def test_cards_and_rows_that_hold_controls_are_clicked_beside_them(site, browse):
    page = ("""<style>.card { cursor: pointer; width: 300px }</style>
        <div class=card id=one><b>Buy</b> milk <button>Menu</button></div><div class=card id=two>Buy bread</div>
        <div class=card id=three style="width:fit-content"><button>Only this</button></div>
        <table><tr id=row><td><input type=checkbox><td>Ann<td>Invoice 12</table>
        <script>for (const id of ['one', 'two', 'three', 'row']) document.getElementById(id).addEventListener(
        'click', event => event.target.closest('button,input') || (document.title += id))</script>""")
    text = ("<div>Buy <0></div> milk <button>Menu <1></button>\n<div>Buy bread <2></div>\n<button>Only this <3></button>\n"
            "<checkbox>Ann <4> = off</checkbox> | <tr>Ann <5></tr> | Invoice 12")

    async def test(session):
        assert (await session.observe())[1] == text
        for element in (0, 2, 5, 1, 3, 4):
            await act(session, f'do(action="Click", element="{element}")')
        assert await session.page.title() == "onetworow"
    browse(test, site({"/": page}))


def test_rows_are_clicked_where_their_table_listens(site, browse):
    async def test(session):
        await session.observe()
        assert "title: 25" in await act(session, 'do(action="Click", element="1")')
    rows = f"<table id=root><tr><td>24<tr><td>25</table>{LISTEN}"
    browse(test, site({"/": rows}))


LIST = "".join(f"<p><a href=/{i}>go {i}</a>" for i in range(60))
HEADER = "<header style='position:sticky;top:0;height:90px;background:red'>head</header>"
PANEL = f"<div style='height:300px;overflow:auto'>{HEADER}{LIST}</div>"


@pytest.mark.parametrize("page, scrolled", [(HEADER + LIST, "scrollTo(0, 500)"),
                                            (PANEL, "document.querySelector('div').scrollTo(0, 500)")])
def test_a_header_that_stays_covers_nothing_for_good(site, browse, page, scrolled):
    async def test(session):
        await session.page.evaluate(scrolled)
        text = (await session.observe())[1]
        assert all(f"<a>go {i} <{i}></a>" in text for i in range(60))
        hidden = await session.page.evaluate("""[...document.links].findIndex(link => {
            const {x, y} = link.getBoundingClientRect();
            return document.elementFromPoint(x + 3, y + 3)?.localName === 'header'; })""")
        assert hidden > 5 and await act(session, f'do(action="Click", element="{hidden}")') == "there"
    browse(test, site({"/": page} | {f"/{i}": "there" for i in range(60)}))


@pytest.mark.parametrize("layer", ["inset:0", "top:0;left:0;right:0;height:90px"])
def test_what_no_scrolling_brings_to_light_is_out(site, browse, layer):
    """Behind a dialog, or below a header on a page that does not scroll."""
    async def test(session):
        left_out = f"{BEHIND}\n" if layer == "inset:0" else ""
        assert (await session.observe())[1] == f"{left_out}head"
    style = f"position:fixed;background:red;{layer}"
    browse(test, site({"/": f"<a href=/x>below</a><div style='{style}'>head</div>"}))


def test_a_fixed_background_hides_nothing(site, browse):
    """A short page over a picture behind it was once taken for one behind a dialog."""
    async def test(session):
        assert (await session.observe())[1] == "# Sign in\n<input>User <0></input> <button>Go <1></button>"
    background = "<!doctype html><canvas style='position:fixed;inset:0;width:100%;height:100%;z-index:-1'></canvas>"
    browse(test, site({"/": f"{background}<h1>Sign in</h1><form><input aria-label=User> <button>Go</button></form>"}))


def test_what_a_clip_path_cuts_off_has_no_id(site, browse):
    async def test(session):
        text = (await session.observe())[1]
        assert "<button>Menu <0></button>" in text and "<a>" not in text
        assert "<a>Orders <1></a>" in await act(session, 'do(action="Click", element="0")')
        assert await act(session, 'do(action="Click", element="1")') == "orders"
    browse(test, site({"/orders": "orders", "/": "<style>nav{position:absolute;top:60px;clip-path:inset(0 0 100% 0)}"
        "nav.open{clip-path:inset(0)}</style>"
        "<button onclick=\"document.querySelector('nav').classList.toggle('open')\">"
        "Menu</button><nav><a href=/orders>Orders</a></nav>"}))


@pytest.mark.parametrize("html, seen", [
    ("<span id=l>Status</span><div role=combobox tabindex=0 aria-labelledby=l>Open</div>",
     "<div>Status <0> = Open</div>"),
    ("<button role=combobox aria-label=Priority aria-expanded=true>High</button>",
     "<button>Priority <0> = High, expanded</button>"),
    ("<button aria-label='Sort by' aria-haspopup=menu>Newest</button>", "<button>Sort by <0> = Newest</button>"),
    ("<div role=spinbutton tabindex=0 aria-label=Guests>2</div>", "<div>Guests <0> = 2</div>"),
    ("<a href=/x aria-label=Cart>3</a>", "<a>Cart <0> = 3</a>"),
    ("<a href=/x aria-label='Cart, 3 items'>3</a>", "<a>Cart, 3 items <0></a>"),
    ("<button aria-label='Book slot'>10:30</button>", "<button>Book slot <0> = 10:30</button>"),
    ("<div role=button tabindex=0 aria-label=Card>fix login<br>now</div>", "<button>Card <0> = fix login now</button>"),
    ("<button aria-label=Plan>Free</button>", "<button>Plan <0> = Free</button>"),
    ("<button aria-label='Add Lamp to cart'>add lamp</button>", "<button>Add Lamp to cart <0></button>"),
    ("<button aria-label='Ann Vik'>AN</button>", "<button>Ann Vik <0></button>"),  # an avatar
    ("<button aria-label=Menu>more_vert</button>", "<button>Menu <0></button>"),  # an icon
    ("<button aria-label=Close>x</button>", "<button>Close <0></button>"),
    ("<button aria-disabled=true>Pay</button>", "Pay (disabled)"),
])
def test_what_a_drawn_control_shows_stands_after_its_name(site, browse, html, seen):
    """Drawn dropdowns have a label and, inside, what was chosen. Only the label was written once."""
    async def test(session):
        assert seen in (await session.observe())[1]
    browse(test, site({"/": html}))


def test_the_leaves_of_a_tree_are_chosen_apart(site, browse):
    async def test(session):
        text = (await session.observe())[1]
        number = re.search(r"<li>API <(\d+)>", text)[1]
        assert "chosen: API" in await act(session, f'do(action="Click", element="{number}")')
    browse(test, site({"/": """<ul role=tree id=t><li role=treeitem>Docs<ul><li role=treeitem>Guide<li role=treeitem>API
        </ul></ul><p id=o></p><script>t.addEventListener('click', event =>
        { o.textContent = 'chosen: ' + event.target.closest('li').firstChild.data })</script>"""}))


def test_a_click_below_the_window_on_what_something_covers_is_an_error(site, browse):
    """Below the window nobody can ask what lies on top; the click scrolls there and finds out."""
    async def test(session):
        assert (await session.observe())[1] == "<a>go <0></a>\npop-up"
        with pytest.raises(ActionError, match="something else lies on top of element 0"):
            await execute(session, 'do(action="Click", element="0")')
    link = "<a href=/x style='position:absolute;top:2000px'>go</a>"
    over = "<p style='position:absolute;top:1980px;width:99px;height:99px;margin:0'>pop-up</p>"
    browse(test, site({"/": f"{link}{over}<p style='height:4000px'>"}))


def test_every_part_of_an_image_is_clicked(site, browse):
    """The middle of an L lies outside of it, and what no other part covers is a part as well."""
    async def test(session):
        parts = "plan <area>Hall <0></area> <area>Round <1></area> <area>Elsewhere <2></area>"
        for i, name in enumerate(("hall", "round", "else")):
            assert (await session.observe())[1] == parts
            assert await act(session, f'do(action="Click", element="{i}")') == name
            await session.go_back()
    browse(test, site({
        "/": "<img usemap=#m width=300 height=200 alt=plan><map name=m><area href=/hall alt=Hall shape=poly "
             "coords='0,0,300,0,300,40,40,40,40,200,0,200'><area href=/round alt=Round shape=circle coords='260,160,20'>"
             "<area href=/else alt=Elsewhere shape=default></map>", "/hall": "hall", "/round": "round", "/else": "else"}))


def test_framesets_and_parts_of_images_are_read_and_clicked(site, browse):
    async def test(session):
        assert (await session.observe())[1] == "<a>one <0></a>\nplan <area>Hall <1></area> <area>Garden <2></area>"
        assert (await act(session, 'do(action="Click", element="2")')).endswith("garden")
        assert await act(session, 'do(action="Click", element="0")') == "second"
    browse(test, site({
        "/": "<frameset cols=30%,70%><frame src=/one><frame src=/map></frameset>",
        "/one": "<a href=/two target=_top>one</a>", "/two": "second", "/garden": "garden",
        "/map": "<p style='height:2000px'></p><img usemap=#m width=200 height=100 alt=plan><map name=m>"
                "<area href=/x alt=Hall coords=0,0,99,99>"
                "<area href=/garden title=Garden shape=circle coords=150,50,40></map>"}))


def test_a_frame_is_read_and_used_like_the_page_around_it(site, browse):
    """Its listeners and refused forms count, its requests are waited for, and its own dialog covers it alone."""
    async def test(session):
        click = lambda element: act(session, f'do(action="Click", element="{element}")')
        text = (await session.observe())[1]
        assert text == ("<a>out <0></a>\n<b>Save <1></b>\n<input>city <2></input> <button>Send <3></button>\n"
                        "<body> <4></body>")
        assert "saved: late" in await click(1)
        assert 'note: the browser refuses "city"' in await click(3)
        await session.page.evaluate("cover.hidden = false")
        with pytest.raises(ActionError, match="something else lies on top of element 1"):
            await execute(session, 'do(action="Click", element="1")')
        await session.page.evaluate("cover.hidden = true; frames[0].ask.showModal()")
        assert (await session.observe())[1].startswith(
            f"<a>out <0></a>\n{BEHIND}\nsure? <button>yes <1></button>")

    def late(handler):
        time.sleep(0.3)
        handler.send_response(200)
        handler.send_header("Content-Length", "4")
        handler.end_headers()
        handler.wfile.write(b"late")

    inner = ("<b id=save>Save</b><form><input name=city required><button>Send</button></form>"
             "<dialog id=ask>sure? <button>yes</button></dialog><script>save.addEventListener('click', async () => {"
             "save.textContent = 'saved: ' + await (await fetch('/late')).text(); })</script>")
    cover = "<div id=cover hidden style='position:fixed;inset:0;background:red'></div>"
    editing = "<script>frames[1].document.designMode = 'on'</script>"
    browse(test, site({"/": f"<a href=/x>out</a><iframe src=/inner></iframe><iframe></iframe>{editing}{cover}",
                       "/inner": inner, "/late": late}))


@pytest.mark.parametrize("start", [
    "<iframe src=/inner></iframe><script>frames[0].used = 1</script>",
    "<button onclick=\"window.open('/inner').used = 1\">open</button>"])
def test_a_document_in_the_window_of_the_empty_one_before_it(site, browse, start):
    """A frame or a tab whose window a script uses early keeps that window, without its listeners."""
    async def test(session):
        click = lambda element: act(session, f'do(action="Click", element="{element}")')
        text = (await session.observe())[1]
        if "open" in text:
            text = await click(0)
            assert await session.page.evaluate("used") == 1
        assert text.endswith("<input>city <0></input> <button>Send <1></button>\n<b>move <2></b>")
        assert 'note: the browser refuses "city"' in await click(1)
        assert "<b>moved <2></b>" in await click(2)

    inner = ("<form><input name=city required><button>Send</button></form><b style='transition: opacity .4s' "
             "onclick='this.style.opacity = .5' ontransitionend='this.textContent = \"moved\"'>move</b>")
    browse(test, site({"/": start, "/inner": inner}))


def test_what_scrolling_loads_is_seen(site, browse):
    async def test(session):
        await session.observe()
        assert "\nmore\n" in await act(session, 'do(action="Scroll Down")')
    page = ("<p style='height:3000px'>top</p><p id=end></p><p>end</p><script>onscroll = () => "
            "setTimeout(() => end.textContent = 'more', 50)</script>")
    browse(test, site({"/": page}))


def test_a_frame_of_another_site_is_mentioned(site, browse):
    other = site({"/pay": "<button>pay</button>"})

    async def test(session):
        assert (await session.observe())[1] == f"[a frame that cannot be read: Card {other}/pay] <a>on <0></a>"
    browse(test, site({"/": f"<iframe src={other}/pay title=Card></iframe><a href=/>on</a>"}))


def test_choosing_again_in_a_multiple_select_takes_back(site, browse):
    async def test(session):
        await session.observe()
        choose = lambda option: act(session, str(Call("Select Dropdown Option", option, "0")))
        assert "size <0> = a | b (a | b | c)" in await choose("b")
        assert "size <0> = b (a | b | c)" in await choose("a")
    page = "<select multiple aria-label=size><option selected>a<option>b<option>c</select>"
    browse(test, site({"/": page}))


def test_options_that_are_called_the_same_are_told_apart_by_their_groups(site, browse):
    async def test(session):
        assert "size <0> = Men: S (Men: S | Women: S | Any)" in (await session.observe())[1]
        choose = lambda option: act(session, str(Call("Select Dropdown Option", option, "0")))
        assert "size <0> = Women: S (" in await choose("Women: S")
        assert "size <0> = Men: S (" in await choose("S")
    page = "<select aria-label=size><optgroup label=Men><option>S<optgroup label=Women><option>S<option>Any</select>"
    browse(test, site({"/": page}))


def test_what_a_dropdown_in_a_shadow_root_says_leaves_it(site, browse):
    """A person's input event is composed, the change event is not."""
    async def test(session):
        await session.observe()
        choose = str(Call("Select Dropdown Option", "b", "0"))
        assert "title: input\n" in await act(session, choose)
    page = ("<div id=host><template shadowrootmode=open><select><option>a<option>b</select></template></div><script>"
            "for (const type of ['input', 'change']) host.addEventListener(type, () => document.title += type)</script>")
    browse(test, site({"/": page}))


def test_a_column_that_stays_covers_nothing_for_good(site, browse):
    async def test(session):
        await session.observe()
        assert "| <button>B <1></button> |" in await act(session, 'do(action="Click", element="2")')  # it scrolls sideways
        assert await session.page.evaluate("panel.scrollLeft") > 0
        assert "title: B" in await act(session, 'do(action="Click", element="1")')
    page = ("<style>#panel{width:500px;overflow:auto}td{min-width:150px;background:#fff}td:first-child{position:sticky;left:0}"
            "</style><div id=panel><table><tr><td>Ann<td><button>A</button><td><button>B</button><td>x"
            "<td><button>D</button></table></div><script>panel.onclick = e => { document.title = e.target.textContent }</script>")
    browse(test, site({"/": page}))


def test_the_mouse_chooses_the_panel_to_scroll(site, browse):
    """Two panels beside each other: the one in the middle, until the mouse is over the other."""
    async def test(session):
        scrolled = "[list.scrollTop > 0, mail.scrollTop > 0]"
        await session.observe()
        await act(session, 'do(action="Scroll Down")')
        assert await session.page.evaluate(scrolled) == [False, True]
        await session.page.evaluate("mail.scrollTo(0, 0)")
        await act(session, 'do(action="Hover", element="0")')
        await act(session, 'do(action="Scroll Down")')
        assert await session.page.evaluate(scrolled) == [True, False]
    page = ("<style>body{display:flex;height:100vh;margin:0;overflow:hidden}div{overflow:auto;flex:2}#list{flex:1}</style>"
            f"<div id=list><button>first</button>{'<p>row' * 90}</div><div id=mail>{'<p>line' * 90}</div>")
    browse(test, site({"/": page}))


def test_a_mouse_beside_a_dialog_does_not_scroll_the_page_behind_it(site, browse):
    async def test(session):
        await session.observe()
        await act(session, 'do(action="Click", element="0")')
        await session.page.mouse.move(9, 300)
        await session.page.wait_for_function("d.matches(':hover')")
        await act(session, 'do(action="Scroll Down")')
        assert await session.page.evaluate("[terms.scrollTop > 0, scrollY > 0]") == [True, False]
    page = ("<!doctype html><style>#terms{height:200px;overflow:auto;margin:200px}#d{position:fixed;inset:0;background:red}"
            "</style><button onclick='d.hidden = false'>Terms</button>"
            f"<div id=d hidden><div id=terms>{'<p>line' * 90}</div></div>{'<p>page' * 90}")
    browse(test, site({"/": page}))


def test_a_button_under_a_pop_up_that_follows_the_page_is_clicked(site, browse):
    """The pop-up moves when its script hears of the scrolling, a frame after it. The click was refused."""
    async def test(session):
        await session.observe()
        assert (await act(session, 'do(action="Click", element="0")')).startswith("title: saved")
    page = ("<p style='height:3000px'>top</p><button onclick='document.title = `saved`'>Save</button><p style='height:60px'>"
            "</p><div id=m style='position:fixed;top:500px;left:0;width:300px;height:200px'>menu</div>"
            "<script>addEventListener('scroll', () => { m.style.top = 500 - scrollY + 'px'; })</script>")
    browse(test, site({"/": page}))


def test_a_button_under_a_bar_that_stays_is_refused(site, browse):
    """At once, even if the page has replaced the timers."""
    async def test(session):
        await session.observe()
        with pytest.raises(ActionError, match="something else lies on top"):
            await execute(session, 'do(action="Click", element="0")')
    browse(test, site({"/": "<p style='height:3000px'>top</p><button>Save</button><p style='height:60px'></p>"
                            "<div style='position:fixed;top:500px;left:0;width:300px;height:200px'>bar</div>"
                            "<script>setTimeout = requestAnimationFrame = () => 0</script>"}))


def test_a_slider_whose_thumb_takes_the_keys_is_moved(site, browse):
    """Its role, its name and its number are those of the thumb's holder, which takes no focus."""
    async def test(session):
        assert (await session.observe())[1] == "<input>Volume <0> = 30</input>"
        assert await act(session, 'do(action="Type", argument="33", element="0")') == "<input>Volume <0> = 33</input>"
    page = ("<div id=s role=slider aria-label=Volume aria-valuenow=30 style='width:200px;height:20px'><div id=t tabindex=0 "
            "style='width:20px;height:20px'></div></div><script>t.onkeydown = event => "
            "{ s.ariaValueNow = Number(s.ariaValueNow) + (event.key === 'ArrowUp' ? 1 : -1); }</script>")
    browse(test, site({"/": page}))


def test_a_picture_without_a_body_is_read(site, browse):
    async def test(session):
        def picture(handler):
            handler.send_response(200)
            handler.send_header("Content-Type", "image/svg+xml")
            handler.end_headers()
            handler.wfile.write(b"<svg xmlns='http://www.w3.org/2000/svg'><text y='20'>sales</text></svg>")
            handler.close_connection = True
        base = site({"/": picture})
        await session.page.goto(base)
        assert "sales" in (await session.observe())[1]
    browse(test, site({"/": "start"}))


def test_an_option_that_no_person_can_choose_is_refused(site, browse):
    async def test(session):
        await session.observe()
        with pytest.raises(ActionError, match="its options are: on"):
            await session.execute("Select Dropdown Option", Session.select_option, 0, "off")
    browse(test, site({"/": "<select><option>on<optgroup disabled><option>off</optgroup></select>"}))


NAMES = """<div id=all></div><script>
const names = type => type
  ? [...Object.getOwnPropertyNames(type), ...names(Object.getPrototypeOf(type))] : [];
all.innerHTML = names(Document.prototype).map(name => `<img name="${name}">`).join('')
  + '<form>' + names(HTMLFormElement.prototype).map(name => `<input type=checkbox name="${name}">`).join('')
  + '<button>send</button></form><a href=/x aria-labelledby=k>x</a><b id=k>on</b>';
</script>"""


def test_no_name_of_a_field_or_an_image_hides_a_control(site, browse):
    """`document.elementFromPoint` is an image of that name, and a form's `matches` is a field."""
    async def test(session):
        text = (await session.observe())[1]
        assert text.startswith("title: all names\n") and text.count("= off</checkbox>") > 300
        assert "<button>send" in text and "<a>on" in text
    browse(test, site({"/": "<title>all names</title>" + NAMES}))
