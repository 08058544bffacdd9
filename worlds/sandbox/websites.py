"""Little websites, each made up for one exercise, and visits to them by somebody who knows the way.

A site has sections of entries, lists over several pages, forms, a search; structure, labels and contents are random. A
visit plays one or two instructions on a new site and records every page with the response to it. Some visits contain a
planted mistake, which the next turn fixes; the mistake is in the history without its page, so that bc.py does not learn
it. Some end with "N/A": the entry or the fact is not there, or the site refuses.
"""
import re
from random import Random
from typing import NamedTuple

from .vocabulary import DETAILS, FACTS, FIELDS, FILLERS, FORMS, LINKS, MENUS, MORE, SECTIONS, VERBS
from .writing import (THINGS, Element, Moment, act, click, draw, kind_of_value, maybe, name_maker, named_in, number,
                      phrase, quoted, say, unknown)
from .words import ADJECTIVES, CITIES, FORUMS, NAMES, NOUNS, TOPICS


LONGEST = 16  # turns of a visit


class Section:
    """Entries of one kind: what they are called, what is known of each, and what can be done with them."""

    def __init__(self, rng: Random, label: str):
        self.label, size = label, rng.choice((3, 5, 7, 10, 14))
        one = label.removesuffix("s") if label.endswith("s") else "entry"
        styles = {"two words": name_maker(rng, max(4, size)), "number": lambda: f"{one} {number(rng)}",
                  "one word": lambda: rng.choice(NAMES + CITIES + FORUMS + TOPICS), "unknown": lambda: unknown(rng),
                  "mixed": lambda: f"{rng.choice(ADJECTIVES + NOUNS)} {unknown(rng)}"}
        name = styles[draw(rng, {"two words": 5, "number": 2, "one word": 1, "unknown": 1, "mixed": 1})]
        self.labels = rng.sample(FACTS + DETAILS, rng.randint(2, 5))
        values = {each: kind_of_value(rng) for each in self.labels}
        self.entries = {name(): {each: values[each]() for each in self.labels} for _ in range(size)}
        self.linked = maybe(rng, 0.5, rng.choice(self.labels))  # a fact whose value is a link
        # The list of entries: what it shows of each, with bars or without, under a line of labels or none.
        self.columns, self.per_page = rng.sample(self.labels, rng.choice((0, 0, 1, 1, 2))), rng.choice((3, 4, 5, 6, 8, 10, 14))
        self.bars, self.header = len(self.columns) > 1 or rng.random() < 0.2, rng.random() < 0.5
        verbs, menu = rng.sample(VERBS, 5), rng.choice(sorted(MENUS))
        self.row_verb = maybe(rng, 0.25, verbs[3])
        # The page of an entry: buttons, a menu, a field with its button, a link to a form that changes facts.
        ends = ("", "", "", " it", " now", f" {one}", " this", f" to {rng.choice(MORE)}")
        self.buttons = [verb + rng.choice(ends) for verb in verbs[:rng.randint(1, 3)]]
        self.menu, self.options = maybe(rng, 0.35, menu), options(rng, menu)
        self.field, self.send = maybe(rng, 0.35, rng.choice(FIELDS[1:])), rng.choice((verbs[4], "send", "ok", "add"))
        edits = "edit", "change", "correct", f"edit {one}", f"edit {rng.choice(LINKS)}"
        self.edit = maybe(rng, 0.3, rng.choice(edits))
        self.editable = rng.sample(self.labels, min(len(self.labels), rng.randint(1, 3)))

    def page_of(self, name: str) -> tuple:
        """The address of the list that shows an entry."""
        return "list", self.label, list(self.entries).index(name) // self.per_page * self.per_page


def options(rng: Random, menu: str) -> list[str]:
    words = MENUS[menu].split()
    return rng.sample(words, min(len(words), rng.randint(2, 5)))


class Form(NamedTuple):
    """Fields over one or two pages. `before`: the link on a page of facts that it stands behind, or ""."""
    pages: list[list[str]]
    menu: str
    options: list[str]
    last: str
    before: str

    @classmethod
    def new(cls, rng: Random, label: str):
        fields, menu = rng.sample(FIELDS[1:], rng.randint(1, 4)), rng.choice(sorted(MENUS))
        cut = len(fields) - len(fields) // 2 if len(fields) > 2 and rng.random() < 0.4 else len(fields)
        last = rng.choice(("save", "send", "done", "ok", "submit", "confirm", rng.choice(VERBS)))
        return cls([page for page in (fields[:cut], fields[cut:]) if page], maybe(rng, 0.4 * (menu not in fields), menu),
                   options(rng, menu), last, rng.choice(("", "", "edit", "change", f"edit {label}")))


class Site:
    """Pages by address: ("home",), ("list", section, first), ("entry" or "edit", section, name), ("form", label, step),
    ("found", query), ("other", label). A page is a heading and lines of words and elements; elements know where they lead;
    ("done", address) is what sends a form.
    """

    def __init__(self, rng: Random):
        self.name = rng.choice((unknown(rng), rng.choice(THINGS), f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"))
        self.home = rng.choice(("home", "home", "start", "overview", self.name))
        self.more = rng.choice(("next page", "next", "more", "older", "further", "show more"))
        self.back = rng.choice(("previous page", "previous", "newer", "back", ""))
        self.sections = {label: Section(rng, label) for label in rng.sample(SECTIONS, rng.randint(1, 4))}
        names = {self.home, self.name}
        for section in self.sections.values():  # a name means one entry, and never the way home
            new = {name: facts for name, facts in section.entries.items() if name not in names}
            section.entries = new or {unknown(rng): dict.fromkeys(section.labels, "none")}
            names |= section.entries.keys()
        self.forms = {label: Form.new(rng, label) for label in rng.sample(FORMS, rng.randint(1, 2))}
        taken = {self.home, self.more, self.back, *self.sections, *self.forms}
        others = [each for each in rng.sample(LINKS, rng.randint(0, 6)) if each not in taken]
        self.bar = [*others, *self.forms, *maybe(rng, 0.4, self.sections, ())]
        rng.shuffle(self.bar)
        self.bar.insert(rng.choice((0, 0, len(self.bar))), self.home)
        self.search = maybe(rng, 0.6, rng.choice(("search", "search", "look up", "query")))
        self.mark = maybe(rng, 0.2, rng.choice(("selected", "current")))  # of the link in the bar that leads here
        # A button on every page; it leads home, as logging out does.
        self.out = maybe(rng, 0.5, rng.choice((rng.choice(VERBS), f"{rng.choice(VERBS)} {rng.choice(MORE)}")))
        self.go, self.in_line = rng.choice(("go", "find", "ok")), rng.random() < 0.4
        self.line_found = rng.choice(("{} found", "{} results", "{} found for {q}", "{} matches for {q}"))
        self.prose = [" ".join(rng.choices(FILLERS + THINGS, k=rng.randint(2, 7))) for _ in range(rng.randint(0, 2))]
        refusal = (rng.choice(("this is", "you are", "sorry ,")),
                   rng.choice(("forbidden", "denied", "refused", "reserved", "for members only")))
        self.refusal = maybe(rng, 0.08, " ".join(refusal))
        self.typed: dict[tuple, str] = {}  # by address and field: what was typed on a page and not sent
        self.sent: dict[tuple, str] = {}   # by form and field

    def send(self, at: tuple):
        for (kind, label, where, field), value in self.typed.items():
            if kind == "edit":
                self.sections[label].entries[where][field] = value
            self.sent[label, field] = value
        self.typed.clear()

    def address(self, label: str) -> tuple:
        kinds = {"home": [self.home], "list": self.sections, "form": self.forms}
        kind = next((kind for kind, labels in kinds.items() if label in labels), "other")
        return (kind,) if kind == "home" else (kind, label, 0) if kind != "other" else (kind, label)

    def link(self, label: str) -> Element:
        return Element("a", label, to=self.address(label))

    def control(self, kind: str, name: str, at: tuple, held: str = "", options=()) -> list:
        return [Element(kind, name, self.typed.get((*at, name), held), tuple(options))]

    def page(self, at: tuple) -> list[list]:
        heading, lines = getattr(self, at[0] + "_page")(*at[1:])
        bar = [[self.link(each) for each in self.bar]]
        bar = [[e._replace(value=self.mark) if e.to[:2] == at[:2] else e for e in line] for line in bar]
        bar += [[Element("button", self.out, to=("done", ("home",)))]] if self.out else []
        if self.search:
            bar.append([Element("input", self.search), Element("button", self.go)])
        return [[f"title: {heading}"], *bar, [f"# {heading}"], *lines]

    def home_page(self):
        links = [self.link(each) for each in self.sections if each not in self.bar]
        return self.name, [*([each] for each in self.prose), *([links] if self.in_line and links else [[e] for e in links])]

    def other_page(self, label: str):
        return label, [[each] for each in self.prose]

    def row(self, s: Section, name: str) -> list:
        cells = [Element("a", name, to=("entry", s.label, name)), *(s.entries[name][each] for each in s.columns)]
        if s.row_verb:
            cells.append(Element("button", f"{s.row_verb} {name}", to=("done", s.page_of(name))))
        return [part for cell in cells for part in ("|", cell)][1:] if s.bars else cells

    def list_page(self, label: str, first: int):
        s = self.sections[label]
        names, after = [*s.entries], first + s.per_page
        head = [[" | ".join(["name", *s.columns])]] if s.columns and s.header else []
        turn = [Element("a", self.back, to=("list", label, max(0, first - s.per_page)))] if first and self.back else []
        turn += [Element("a", self.more, to=("list", label, after))] if after < len(names) else []
        return label, [*head, *(self.row(s, name) for name in names[first:after]), *([turn] if turn else [])]

    def entry_page(self, label: str, name: str):
        s, here = self.sections[label], ("entry", label, name)
        lines = [[each, Element("a", value, to=("other", value)) if each == s.linked else value]
                 for each, value in s.entries[name].items()]
        lines += [[Element("a", s.edit, to=("edit", label, name))]] if s.edit else []
        lines += [self.control("select", s.menu, here, s.options[0], s.options)] if s.menu else []
        if s.field:
            lines += [self.control("textarea", s.field, here), [Element("button", s.send, to=("done", here))]]
        lines += [[Element("button", each, to=("done", here))] for each in s.buttons]
        return name, lines + [[each] for each in self.prose[:1]]

    def edit_page(self, label: str, name: str):
        s = self.sections[label]
        lines = [self.control("input", each, ("edit", label, name), s.entries[name][each]) for each in s.editable]
        return f"{s.edit} {name}", [*lines, [Element("button", "save", to=("done", ("entry", label, name)))]]

    def form_page(self, label: str, step: int):
        form = self.forms[label]
        here, number = ("form", label, step), step - bool(form.before)
        if number < 0:
            facts = [[each, self.sent.get((label, each), "none")] for each in form.pages[0]]
            return label, [*facts, [Element("a", form.before, to=("form", label, 1))]]
        lines = [self.control("input", each, here) for each in form.pages[number]]
        if form.menu and number == 0:
            lines.append(self.control("select", form.menu, here, form.options[0], form.options))
        last = number == len(form.pages) - 1
        button = Element("button", form.last, to=("done", ("home",))) if last else \
            Element("button", "continue", to=("form", label, step + 1))
        return label, [*lines, [button]]

    def hits(self, query: str) -> list[tuple]:
        wanted = set(query.split())
        return [(s, name) for s in self.sections.values() for name in s.entries if wanted <= set(name.split())]

    def results(self, query: str) -> str:
        return self.line_found.format(len(self.hits(query)), q=query)

    def found_page(self, query: str):
        return "search", [[self.results(query)], *(self.row(*hit) for hit in self.hits(query)[:8])]


class Step(NamedTuple):
    """Be at a place, or anywhere for (), and there, unless being there is all, act. "Carry": keep a fact in mind, for the
    next thought.
    """
    place: tuple
    action: str = ""
    name: str = ""
    argument: str | None = None


class Visit:
    """One task on a new site. `moments` become the turns of a record, `task` is its intent."""

    def __init__(self, rng: Random, goal: str = ""):
        self.rng, self.site, self.moments = rng, Site(rng), []
        self.first_line, self.feedback, self.carried = "", "", ""
        self.slips, self.random_ids = rng.choice((0, 0, 0, 0.15)), rng.random() < 0.3
        self.section = rng.choice(list(self.site.sections.values()))
        starts = {("home",): 2, ("list", self.section.label, 0): 1, self.site.address(rng.choice(self.site.bar)): 1}
        self.at = draw(rng, starts)
        self.look()
        number = 1 if goal else rng.choice((1, 1, 1, 1, 2, 2, 3))
        goals = [getattr(self, goal or draw(rng, GOALS))() for _ in range(number)]
        goals = sorted(goals, key=lambda goal: goal[2] is not None)  # what ends in an answer comes last
        goals = goals[:next((i for i, goal in enumerate(goals, 1) if goal[2]), len(goals))]  # one answer at most
        self.task = rng.choice((" and ", " , then ", " . ")).join(task for task, *_ in goals)
        steps = [step for _, steps, _ in goals for step in steps]
        things = [each for step in steps for each in (*step.place[1:], step.name, step.argument) if isinstance(each, str)]
        self.wanted = named_in(self.task, [*things, self.section.label, *self.section.labels])
        if self.play(steps):
            answer = goals[-1][2]
            self.finish(*(answer() if answer else ("done", "all is done")))

    def look(self):
        """Writes the page of the moment as an observation."""
        lines = self.site.page(self.at)
        if self.feedback:
            lines.insert(next(i for i, line in enumerate(lines) if line[0][:2] == "# ") + 1, [self.feedback])
        count = sum(isinstance(part, Element) for line in lines for part in line)
        numbers = iter(self.rng.sample(range(max(100, count)), count) if self.random_ids else range(count))
        lines = [[part._replace(number=next(numbers)) if isinstance(part, Element) else part for part in line]
                 for line in lines]
        self.seen = {part.name: part for line in lines[::-1] for part in line[::-1] if isinstance(part, Element)}
        shown = [" ".join(part.html() if isinstance(part, Element) else part for part in line) for line in lines]
        self.text = "\n".join([self.first_line] * bool(self.first_line) + shown)
        self.first_line = self.feedback = ""

    def respond(self, response: tuple[str, str], learned: bool = True):
        self.moments.append(Moment(self.text, *response, self.task, self.wanted, learned))

    def finish(self, message: str, thought: str) -> bool:
        self.respond(say(message, thought))
        return False

    # ---- the way
    def play(self, steps: list[Step]) -> bool:
        """False if it ended early: a place does not exist, or the site refuses."""
        i = 0
        while i < len(steps):
            place, action, name, argument = steps[i]
            if len(self.moments) > LONGEST:  # a name led astray, as "search" that is also an entry's
                return False
            if place and self.at != place:
                start = i  # what was typed on a page and not sent is lost
                while i and steps[i - 1].place[:2] == place[:2] and steps[i - 1].action not in ("", "Click"):
                    i -= 1
                if i == start and not self.approach(place, name):
                    return False
                continue
            if action == "Carry":
                self.carried = f"the {name} is {argument} so"
            elif action and not self.do(action, name, argument):
                continue
            i += 1
            if self.site.refusal and self.site.refusal in self.text:
                return self.finish("N/A", f"{self.site.refusal} so it cannot be done")
        return True

    def approach(self, place: tuple, target: str) -> bool:
        """One action on the way to a place; False if there is none such."""
        site, (kind, label, *rest), thought = self.site, place, ""
        wanted = target if kind == "list" else rest[0] if rest else ""
        if kind == "found":
            return self.do("Search", site.search, label) or True
        if kind == "form":
            form = site.forms[label]
            forward = form.before if form.before and rest[0] == 1 else "continue"
            name = forward if rest[0] and self.at == ("form", label, rest[0] - 1) else label
        elif kind == "edit" and self.at == ("entry", label, wanted):
            name = site.sections[label].edit
        elif kind != "list" and wanted in self.seen:
            name = wanted
        elif self.at[:2] == ("list", label) and not (kind == "list" and self.at[2] >= rest[0]):
            if site.more not in self.seen:
                return self.finish("N/A", f"{wanted} is not in {label}")
            name, thought = site.more, f"{wanted} is not here so"
        elif label in self.seen:
            name, thought = label, f"{wanted} is in {label} so"
        else:
            name, thought = site.home, f"{label} is not here so"
        self.do("Click", name, thought=thought)
        return True

    def do(self, action: str, name: str, argument: str | None = None, thought: str = "") -> bool:
        """False if something else happened."""
        if self.rng.random() < self.slips and len(self.moments) < 9:
            return self.slip(name)
        plan = {"Click": f"click {name}", "Type": f"type {argument} into {name}", "Search": f"search for {argument}",
                "Select Dropdown Option": f"choose {argument} as {name}"}[action]
        thought, self.carried = self.carried or thought, ""
        self.respond(act(f"{thought} {plan}".strip(), action, self.seen[name], argument))
        self.happen(action, self.seen[name], argument)
        return True

    def happen(self, action: str, e: Element, argument: str | None = None):
        if action == "Search":
            self.at = ("found", argument)
        elif action != "Click":
            self.site.typed[(*self.at, e.name)] = argument
        elif e.to[:1] == ("done",):
            self.site.send(self.at)
            self.at, said = e.to[1], self.rng.choice(("", "", "saved", "thanks", f"{e.name} : done"))
            self.feedback = self.site.refusal or said
        elif e.to:
            self.at = e.to
            self.site.typed.clear()
        self.look()

    def slip(self, name: str) -> bool:
        """Something goes wrong: another link, or an id that the page does not have, as rollout.py reports it."""
        others = [e for e in self.seen.values() if e.kind == "a" and e.name != name]
        if others and self.rng.random() < 0.4 and not (self.at[0] == "form" and self.at[2]):
            other = self.rng.choice(others)
            self.respond(click(other), learned=False)
            self.happen("Click", other)
        else:
            wrong = self.rng.choice(sorted(set(range(100)) - {e.number for e in self.seen.values()}))
            self.respond(click(self.seen[name]._replace(number=wrong)), learned=False)
            self.first_line = f"error: there is no element {wrong} on this page"
            self.look()
        return False

    # ---- what is asked: (instruction, steps, answer or None), where answer() gives (message, thought) on the last page
    def ask(self, wordings: str, *words) -> str:
        """One of the wordings, with a word too many or too few now and then: what counts is what its slots hold."""
        out = []
        for word in self.rng.choice(wordings.split("|")).split():
            out += [self.rng.choice(FILLERS)] * (self.rng.random() < 0.12)
            out += [word] * ("{" in word or self.rng.random() > 0.08)
        return " ".join(out).format(*words)

    def where(self, s: Section, name: str) -> str:
        it = f'"{name}"' if self.rng.random() < 0.15 else name
        return self.ask("{0} in {1}|{0} under {1}|{0} from the {1}|the {1} entry {0}|{1} , {0}|{0} ( {1} )|"
                        "the one called {0} in the section {1}", it, s.label)

    def target(self, absent: float = 0.1) -> tuple[Section, str, tuple]:
        s = self.section
        name = self.rng.choice(list(s.entries))
        if self.rng.random() < absent:
            while any(name in each.entries for each in self.site.sections.values()):
                name = name_maker(self.rng, 6)()
        return s, name, ("entry", s.label, name)

    def fact(self):
        s, name, place = self.target()
        label = self.rng.choice(s.labels if self.rng.random() < 0.9 else FACTS + DETAILS)
        task = self.ask("tell the {} of {}|report the {} of {}|find out the {} of {}|give the {} of {}|"
                        "i need to know the {} of {}|say which {} belongs to {}|which {} has {}|what {} is given for {}|"
                        "how much or how many {} has {}", label, self.where(s, name))
        return task, [Step(place)], self.reader(s, name, label)

    def reader(self, s: Section, name: str, label: str):
        """Reads a fact off an entry's page."""
        def answer():
            if label not in s.labels:
                return "N/A", f"no {label} is shown here"
            line = re.search(f"^{label} .*", self.text[self.text.index("\n# "):], re.MULTILINE)[0]
            return s.entries[name][label], re.sub("</?a>", "", line)
        return answer

    def cell(self):
        """A fact that the list of entries shows."""
        s, name, _ = self.target(absent=0)
        if not s.columns:
            return self.fact()
        label = self.rng.choice(s.columns)
        task = self.ask("read off the {} beside {}|look at the list and tell the {} of {}", label, self.where(s, name))

        def answer():
            line = next(line for line in self.text.split("\n") if line.startswith(f"<a>{name} "))
            value = s.entries[name][label]
            end = line.index(value, line.index("</a>")) + len(value)
            return value, re.sub("</?[a-z]+>", "", line[:end])
        return task, [Step(s.page_of(name), "", name)], answer

    def press(self):
        s, name, place = self.target()
        button = self.rng.choice(s.buttons)
        task = self.ask("press {0} for {1}|{2} {1}|press the button {0} on {1}|please {2} {1}|{2} {1} and nothing else",
                        button, self.where(s, name), button.split()[0])
        return task, [Step(place, "Click", button)], None

    def press_in_bar(self):
        """A button that every page has, and that leads home."""
        if not self.site.out:
            return self.press()
        task = self.ask("press {0}|{0}|{0} the site|{0} of the site", self.site.out)
        return task, [Step((), "Click", self.site.out)], None

    def press_in_row(self):
        s, name, _ = self.target(absent=0)
        if not s.row_verb:
            return self.press()
        task = self.ask("{0} {1}|press {0} for {1}", s.row_verb, self.where(s, name))
        return task, [Step(s.page_of(name), "Click", f"{s.row_verb} {name}")], None

    def write(self):
        s, name, place = self.target()
        if not (s.field or s.menu):
            return self.press()
        steps, parts, button = [], [], s.send
        if s.menu and (not s.field or self.rng.random() < 0.5):
            option = self.rng.choice(s.options[1:])
            steps.append(Step(place, "Select Dropdown Option", s.menu, option))
            parts.append(self.ask("pick {0} as {1}|take {0} for {1}", quoted(self.rng, option), s.menu))
        if s.field:
            text = phrase(self.rng)
            steps.append(Step(place, "Type", s.field, text))
            parts.append(self.ask("write {0} as {1}|enter {0} into {1}|put {0} as {1}", quoted(self.rng, text), s.field))
        else:
            button = self.rng.choice(s.buttons)
        task = f"{' and '.join(parts)} {self.ask('for|on|of')} {self.where(s, name)}"
        return task + (f" and press {button}" if not s.field else ""), [*steps, Step(place, "Click", button)], None

    def edit(self):
        s, name, _ = self.target()
        if not s.edit:
            return self.write()
        place, label, text = ("edit", s.label, name), self.rng.choice(s.editable), phrase(self.rng)
        task = self.ask("correct the {1} of {2} to {0}|turn the {1} of {2} into {0}|enter {0} as {1} of {2}",
                        quoted(self.rng, text), label, self.where(s, name))
        return task, [Step(place, "Type", label, text), Step(place, "Click", "save")], None

    def fill(self, text: str = ""):
        """A form: one of its fields, or all. `text`: what to write there instead of something random."""
        label = self.rng.choice(list(self.site.forms))
        form, steps, parts = self.site.forms[label], [], []
        every = sum(form.pages, [])
        asked = [self.rng.choice(every)] if text or self.rng.random() < 0.5 else every
        for step, fields in enumerate(form.pages):
            place = ("form", label, step + bool(form.before))
            for field in [each for each in fields if each in asked]:
                words = text or phrase(self.rng)
                parts.append(self.ask("{0} as {1}|{1} {0}", quoted(self.rng, words), field))
                steps.append(Step(place, "Type", field, words))
            if form.menu and step == 0 and not text and self.rng.random() < 0.7:
                option = self.rng.choice(form.options[1:])
                parts.append(f"{quoted(self.rng, option)} as {form.menu}")
                steps.append(Step(place, "Select Dropdown Option", form.menu, option))
            steps.append(Step(place, "Click", "continue" if step < len(form.pages) - 1 else form.last))
        task = self.ask("fill in {1} with {0}|enter {0} in {1}|use {1} to give {0}|write {0} under {1}",
                        " and ".join(parts), label)
        return task, steps, None

    def look_up(self):
        s, name, place = self.target(absent=0)
        if not self.site.search:
            return self.fact()
        if self.rng.random() < 0.4:
            query = self.rng.choice(name.split())
            task = self.ask("look up {0} and count what is found|look up {0} and tell the number of results|"
                            "use the search to count {0}", quoted(self.rng, query))
            count = str(len(self.site.hits(query)))
            return task, [Step(("found", query))], lambda: (count, self.site.results(query))
        query = self.rng.choice((name, name.split()[0]))
        query = query if len(self.site.hits(query)) <= 8 else name
        label, button = self.rng.choice(s.labels), self.rng.choice(s.buttons)
        asked = self.rng.random() < 0.5
        task = self.ask("look up {0} and tell its {1}|use the search for {0} and report its {1}" if asked else
                        "look up {0} and press {2}|use the search for {0} and {2}",
                        quoted(self.rng, query), label, button)
        steps = [Step(("found", query), "Click", name), Step(place, *[] if asked else ("Click", button))]
        return task, steps, self.reader(s, name, label) if asked else None

    def count(self):
        s = self.section
        names = list(s.entries)[:s.per_page]
        task = self.ask("count the entries that the list of {} begins with|tell how long the first page of {} is", s.label)
        thought = " ".join(f"{i} {name}" for i, name in enumerate(names, 1))
        return task, [Step(("list", s.label, 0))], lambda: (str(len(names)), thought)

    def carry(self):
        """Read here, write there."""
        s, name, place = self.target(absent=0)
        label = self.rng.choice(s.labels)
        value = s.entries[name][label]
        _, steps, _ = self.fill(value)
        typed = next(step for step in steps if step.action == "Type")
        task = self.ask("copy the {0} of {1} into {2} of {3}|put the {0} of {1} as {2} into {3}",
                        label, self.where(s, name), typed.name, typed.place[1])
        return task, [Step(place, "Carry", label, value), *steps], None


def visit(rng: Random, goal: str = "") -> Visit:
    """A visit to a new site. One that is led astray by a name is drawn again."""
    drawn = Visit(rng, goal)
    while len(drawn.moments) > LONGEST:
        drawn = Visit(rng, goal)
    return drawn


GOALS = {"fact": 26, "cell": 8, "press": 14, "press_in_bar": 6, "press_in_row": 8, "write": 12, "edit": 8, "fill": 14,
         "look_up": 12, "count": 3, "carry": 4}
