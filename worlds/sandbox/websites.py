"""Little websites, each made up for one exercise, and visits to them by somebody who knows the way.

A site has sections of entries, lists over several pages, forms, a search; structure, labels and contents
are random. A visit plays one to three instructions on a new site and records every page with the response to it.
Some visits contain a planted mistake, which the next turn fixes; the mistake is in the history without its page,
so that bc.py does not learn it. Some end with "N/A": the entry or the fact is not there, or the site refuses.
"""
import re
from random import Random
from typing import NamedTuple

from .vocabulary import DETAILS, FACTS, FIELDS, FILLERS, FORMS
from .vocabulary import LINKS, MENUS, MORE, SECTIONS, VERBS
from .writing import THINGS, Element, Moment
from .writing import act, click, say
from .writing import draw, kind_of_value, maybe, name_maker, named_in, number, phrase, quoted, unknown
from .words import ADJECTIVES, CITIES, FORUMS, NAMES, NOUNS, TOPICS


LONGEST = 16  # turns of a visit

# What a visit is asked to do, each the name of a method of Visit, and how often.
GOALS = {
    "fact": 26,
    "cell": 8,
    "press": 14,
    "press_in_bar": 6,
    "press_in_row": 8,
    "write": 12,
    "edit": 8,
    "fill": 14,
    "look_up": 12,
    "count": 3,
    "carry": 4,
}


def entry_namer(rng: Random, one: str, size: int):
    """Draws the style in which a section names its entries, and returns what draws such a name.

    `one`: a word for one entry.
    """
    two_words = name_maker(rng, max(4, size))

    def numbered():
        return f"{one} {number(rng)}"

    def one_word():
        return rng.choice(NAMES + CITIES + FORUMS + TOPICS)

    def unknown_word():
        return unknown(rng)

    def mixed():
        known = rng.choice(ADJECTIVES + NOUNS)
        return f"{known} {unknown(rng)}"

    shares = {
        two_words: 5,
        numbered: 2,
        one_word: 1,
        unknown_word: 1,
        mixed: 1,
    }
    return draw(rng, shares)


def options(rng: Random, menu: str) -> list[str]:
    words = MENUS[menu].split()
    size = min(len(words), rng.randint(2, 5))
    return rng.sample(words, size)


class Section:
    """Entries of one kind: what they are called, what is known of each, and what can be done with them."""

    def __init__(self, rng: Random, label: str):
        self.label = label
        size = rng.choice((3, 5, 7, 10, 14))
        one = label.removesuffix("s") if label.endswith("s") else "entry"
        new_name = entry_namer(rng, one, size)

        count = rng.randint(2, 5)
        self.labels = rng.sample(FACTS + DETAILS, count)
        new_value = {each: kind_of_value(rng) for each in self.labels}
        self.entries = {}
        for _ in range(size):
            name = new_name()
            self.entries[name] = {each: new_value[each]() for each in self.labels}
        fact = rng.choice(self.labels)
        self.linked = maybe(rng, 0.5, fact)  # a fact whose value is a link

        # The list of entries: what it shows of each, with bars or without, under a line of labels or none.
        count = rng.choice((0, 0, 1, 1, 2))
        self.columns = rng.sample(self.labels, count)
        self.per_page = rng.choice((3, 4, 5, 6, 8, 10, 14))
        self.bars = len(self.columns) > 1 or rng.random() < 0.2
        self.header = rng.random() < 0.5
        verbs = rng.sample(VERBS, 5)
        menu = rng.choice(sorted(MENUS))
        self.row_verb = maybe(rng, 0.25, verbs[3])

        # The page of an entry: buttons, a menu, a field with its button, a link to a form that changes facts.
        ends = ("", "", "", " it", " now", f" {one}", " this", f" to {rng.choice(MORE)}")
        count = rng.randint(1, 3)
        self.buttons = [verb + rng.choice(ends) for verb in verbs[:count]]
        self.menu = maybe(rng, 0.35, menu)
        self.options = options(rng, menu)
        field = rng.choice(FIELDS[1:])
        self.field = maybe(rng, 0.35, field)
        self.send = rng.choice((verbs[4], "send", "ok", "add"))
        edits = ("edit", "change", "correct", f"edit {one}", f"edit {rng.choice(LINKS)}")
        edit = rng.choice(edits)
        self.edit = maybe(rng, 0.3, edit)
        count = min(len(self.labels), rng.randint(1, 3))
        self.editable = rng.sample(self.labels, count)

    def page_of(self, name: str) -> tuple:
        """The address of the list that shows an entry."""
        index = list(self.entries).index(name)
        first = index // self.per_page * self.per_page
        return "list", self.label, first


class Form(NamedTuple):
    """Fields over one or two pages. `before`: the link on a page of facts that it stands behind, or ""."""
    pages: list[list[str]]
    menu: str
    options: list[str]
    last: str
    before: str

    @classmethod
    def new(cls, rng: Random, label: str):
        count = rng.randint(1, 4)
        fields = rng.sample(FIELDS[1:], count)
        menu = rng.choice(sorted(MENUS))

        pages = [fields]
        if len(fields) > 2 and rng.random() < 0.4:
            cut = len(fields) - len(fields) // 2
            pages = [fields[:cut], fields[cut:]]

        verb = rng.choice(VERBS)
        last = rng.choice(("save", "send", "done", "ok", "submit", "confirm", verb))
        share_with_menu = 0 if menu in fields else 0.4
        return cls(
            pages=pages,
            menu=maybe(rng, share_with_menu, menu),
            options=options(rng, menu),
            last=last,
            before=rng.choice(("", "", "edit", "change", f"edit {label}")),
        )


class Site:
    """Pages by address. A page is a heading and lines of words and elements; elements know where they lead.

    The addresses: ("home",), ("list", section, first), ("entry" or "edit", section, name), ("form", label, step),
    ("found", query), ("other", label). An element that leads to ("done", address) sends a form.
    """

    def __init__(self, rng: Random):
        names = (
            unknown(rng),
            rng.choice(THINGS),
            f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}",
        )
        self.name = rng.choice(names)
        self.home = rng.choice(("home", "home", "start", "overview", self.name))
        self.more = rng.choice(("next page", "next", "more", "older", "further", "show more"))
        self.back = rng.choice(("previous page", "previous", "newer", "back", ""))

        count = rng.randint(1, 4)
        labels = rng.sample(SECTIONS, count)
        self.sections = {label: Section(rng, label) for label in labels}
        self.tell_names_apart(rng)

        count = rng.randint(1, 2)
        labels = rng.sample(FORMS, count)
        self.forms = {label: Form.new(rng, label) for label in labels}

        # The bar of links on every page.
        taken = {self.home, self.more, self.back, *self.sections, *self.forms}
        count = rng.randint(0, 6)
        others = [each for each in rng.sample(LINKS, count) if each not in taken]
        sections = maybe(rng, 0.4, self.sections, ())
        self.bar = [*others, *self.forms, *sections]
        rng.shuffle(self.bar)
        place = rng.choice((0, 0, len(self.bar)))
        self.bar.insert(place, self.home)

        search = rng.choice(("search", "search", "look up", "query"))
        self.search = maybe(rng, 0.6, search)
        mark = rng.choice(("selected", "current"))
        self.mark = maybe(rng, 0.2, mark)  # of the link in the bar that leads here

        # A button on every page; it leads home, as logging out does.
        verbs = (
            rng.choice(VERBS),
            f"{rng.choice(VERBS)} {rng.choice(MORE)}",
        )
        verb = rng.choice(verbs)
        self.out = maybe(rng, 0.5, verb)
        self.go = rng.choice(("go", "find", "ok"))
        self.in_line = rng.random() < 0.4
        found = ("{} found", "{} results", "{} found for {q}", "{} matches for {q}")
        self.line_found = rng.choice(found)

        self.prose = []
        for _ in range(rng.randint(0, 2)):
            words = rng.choices(FILLERS + THINGS, k=rng.randint(2, 7))
            self.prose.append(" ".join(words))
        start = rng.choice(("this is", "you are", "sorry ,"))
        end = rng.choice(("forbidden", "denied", "refused", "reserved", "for members only"))
        self.refusal = maybe(rng, 0.08, f"{start} {end}")

        self.typed: dict[tuple, str] = {}  # by address and field: what was typed on a page and not sent
        self.sent: dict[tuple, str] = {}   # by form and field

    def tell_names_apart(self, rng: Random):
        """Drops entries until a name means one entry, and never the way home. No section is left empty."""
        taken = {self.home, self.name}
        for section in self.sections.values():
            kept = {name: facts for name, facts in section.entries.items() if name not in taken}
            if not kept:
                kept = {unknown(rng): dict.fromkeys(section.labels, "none")}
            section.entries = kept
            taken |= kept.keys()

    def send(self):
        """Takes over what was typed."""
        for (kind, label, where, field), value in self.typed.items():
            if kind == "edit":
                entry = self.sections[label].entries[where]
                entry[field] = value
            self.sent[label, field] = value
        self.typed.clear()

    def address(self, label: str) -> tuple:
        """Where a link with this label leads."""
        if label == self.home:
            return ("home",)
        if label in self.sections:
            return ("list", label, 0)
        if label in self.forms:
            return ("form", label, 0)
        return ("other", label)

    def link(self, label: str) -> Element:
        return Element("a", label, to=self.address(label))

    def control(
        self,
        kind: str,
        name: str,
        at: tuple,
        held: str = "",
        options=(),
    ) -> list:
        """A line with one control. It shows what was typed into it, or else what it held before."""
        value = self.typed.get((*at, name), held)
        return [Element(kind, name, value, tuple(options))]

    # ---- pages
    def page(self, at: tuple) -> list[list]:
        """The lines of a page: its title, what every page has, its heading, what is its own."""
        kind, *rest = at
        make = getattr(self, f"{kind}_page")
        heading, lines = make(*rest)

        head = [[self.link_in_bar(each, at) for each in self.bar]]
        if self.out:
            button = Element("button", self.out, to=("done", ("home",)))
            head.append([button])
        if self.search:
            field = Element("input", self.search)
            button = Element("button", self.go)
            head.append([field, button])
        return [
            [f"title: {heading}"],
            *head,
            [f"# {heading}"],
            *lines,
        ]

    def link_in_bar(self, label: str, at: tuple) -> Element:
        """A link as the page `at` shows it: marked, on some sites, if it leads there."""
        link = self.link(label)
        leads_here = link.to[:2] == at[:2]
        return link._replace(value=self.mark) if leads_here else link

    def home_page(self):
        links = [self.link(each) for each in self.sections if each not in self.bar]
        lines = [[each] for each in self.prose]
        if links and self.in_line:
            lines.append(links)
        else:
            lines += [[each] for each in links]
        return self.name, lines

    def other_page(self, label: str):
        return label, [[each] for each in self.prose]

    def row(self, section: Section, name: str) -> list:
        """The line of an entry in a list: its link, some facts, perhaps a button, perhaps bars between them."""
        facts = section.entries[name]
        cells = [Element("a", name, to=("entry", section.label, name))]
        cells += [facts[each] for each in section.columns]
        if section.row_verb:
            here = section.page_of(name)
            button = Element("button", f"{section.row_verb} {name}", to=("done", here))
            cells.append(button)
        if not section.bars:
            return cells

        line = cells[:1]
        for cell in cells[1:]:
            line += ["|", cell]
        return line

    def list_page(self, label: str, first: int):
        """Some entries of a section, from the one with number `first`."""
        section = self.sections[label]
        names = list(section.entries)
        after = first + section.per_page
        before = max(0, first - section.per_page)

        lines = []
        if section.columns and section.header:
            labels = " | ".join(["name", *section.columns])
            lines.append([labels])
        lines += [self.row(section, name) for name in names[first:after]]

        turn = []
        if first and self.back:
            link = Element("a", self.back, to=("list", label, before))
            turn.append(link)
        if after < len(names):
            link = Element("a", self.more, to=("list", label, after))
            turn.append(link)
        if turn:
            lines.append(turn)
        return label, lines

    def entry_page(self, label: str, name: str):
        section = self.sections[label]
        here = ("entry", label, name)

        lines = []
        for fact, value in section.entries[name].items():
            shown = value
            if fact == section.linked:
                shown = Element("a", value, to=("other", value))
            lines.append([fact, shown])

        if section.edit:
            link = Element("a", section.edit, to=("edit", label, name))
            lines.append([link])
        if section.menu:
            held = section.options[0]
            lines.append(self.control("select", section.menu, here, held, section.options))
        if section.field:
            lines.append(self.control("textarea", section.field, here))
            button = Element("button", section.send, to=("done", here))
            lines.append([button])
        for verb in section.buttons:
            button = Element("button", verb, to=("done", here))
            lines.append([button])
        lines += [[each] for each in self.prose[:1]]
        return name, lines

    def edit_page(self, label: str, name: str):
        """A form that changes facts of an entry."""
        section = self.sections[label]
        facts = section.entries[name]
        here = ("edit", label, name)
        after = ("entry", label, name)
        lines = []
        for fact in section.editable:
            lines.append(self.control("input", fact, here, facts[fact]))
        button = Element("button", "save", to=("done", after))
        lines.append([button])
        return f"{section.edit} {name}", lines

    def form_page(self, label: str, step: int):
        """One page of a form. Step 0 shows what was sent, if the form stands behind a link there."""
        form = self.forms[label]
        here = ("form", label, step)
        if form.before and step == 0:
            lines = []
            for field in form.pages[0]:
                value = self.sent.get((label, field), "none")
                lines.append([field, value])
            link = Element("a", form.before, to=("form", label, 1))
            lines.append([link])
            return label, lines

        index = step - 1 if form.before else step
        lines = [self.control("input", each, here) for each in form.pages[index]]
        if form.menu and index == 0:
            held = form.options[0]
            lines.append(self.control("select", form.menu, here, held, form.options))
        is_last = index == len(form.pages) - 1
        if is_last:
            button = Element("button", form.last, to=("done", ("home",)))
        else:
            button = Element("button", "continue", to=("form", label, step + 1))
        lines.append([button])
        return label, lines

    # ---- the search
    def hits(self, query: str) -> list[tuple]:
        """The entries, as (section, name), whose names have all words of the query."""
        wanted = set(query.split())
        found = []
        for section in self.sections.values():
            names = [name for name in section.entries if wanted <= set(name.split())]
            found += [(section, name) for name in names]
        return found

    def results(self, query: str) -> str:
        """The line that says how many entries were found."""
        count = len(self.hits(query))
        return self.line_found.format(count, q=query)

    def found_page(self, query: str):
        lines = [[self.results(query)]]
        for section, name in self.hits(query)[:8]:
            lines.append(self.row(section, name))
        return "search", lines


class Step(NamedTuple):
    """Be at a place, or anywhere for (), and there, unless being there is all, act.

    "Carry": keep a fact in mind, for the next thought.
    """
    place: tuple
    action: str = ""
    name: str = ""
    argument: str | None = None


class Visit:
    """One task on a new site. `moments` become the turns of a record, `task` is its intent."""

    def __init__(self, rng: Random, goal: str = ""):
        self.rng = rng
        self.site = Site(rng)
        self.moments = []
        self.first_line = ""  # an error, above the next page
        self.feedback = ""    # of the site, under the heading of the next page
        self.carried = ""     # the start of the next thought
        self.slips = rng.choice((0, 0, 0, 0.15))
        self.random_ids = rng.random() < 0.3
        sections = list(self.site.sections.values())
        self.section = rng.choice(sections)

        in_bar = rng.choice(self.site.bar)
        starts = {
            ("home",): 2,
            ("list", self.section.label, 0): 1,
            self.site.address(in_bar): 1,
        }
        self.at = draw(rng, starts)
        self.look()

        goals = self.draw_goals(goal)
        between = rng.choice((" and ", " , then ", " . "))
        self.task = between.join(task for task, _, _ in goals)
        steps = []
        for _, some, _ in goals:
            steps += some
        self.wanted = self.names_in_task(steps)

        if self.play(steps):
            _, _, answer = goals[-1]
            message, thought = answer() if answer else ("done", "all is done")
            self.finish(message, thought)

    def draw_goals(self, goal: str) -> list[tuple]:
        """The goals of the visit, each as (instruction, steps, answer or None).

        `goal`: the only one; "" draws one to three.
        """
        count = 1
        if not goal:
            count = self.rng.choice((1, 1, 1, 1, 2, 2, 3))
        silent = []
        answered = []
        for _ in range(count):
            kind = goal or draw(self.rng, GOALS)
            make = getattr(self, kind)
            task, steps, answer = make()
            group = answered if answer else silent
            group.append((task, steps, answer))
        return silent + answered[:1]  # one answer at most, and it comes last

    def names_in_task(self, steps: list[Step]) -> list[str]:
        """What the task names of all that the steps need."""
        things = []
        for step in steps:
            things += step.place[1:]
            things += [step.name, step.argument]
        words = [each for each in things if isinstance(each, str)]
        words += [self.section.label, *self.section.labels]
        return named_in(self.task, words)

    def look(self):
        """Writes the page of the moment as an observation."""
        lines = self.site.page(self.at)
        if self.feedback:
            starts = [line[0][:2] for line in lines]  # of an element, a tuple, which is no heading
            heading = starts.index("# ")
            lines.insert(heading + 1, [self.feedback])

        lines, elements = self.numbered(lines)
        self.seen = {each.name: each for each in elements[::-1]}  # of several with one name, the first

        shown = []
        if self.first_line:
            shown.append(self.first_line)
        for line in lines:
            words = [part.html() if isinstance(part, Element) else part for part in line]
            shown.append(" ".join(words))
        self.text = "\n".join(shown)
        self.first_line = ""
        self.feedback = ""

    def numbered(self, lines: list[list]) -> tuple[list, list]:
        """The lines with a number in every element, and these elements in order."""
        count = sum(isinstance(part, Element) for line in lines for part in line)
        numbers = list(range(count))
        if self.random_ids:
            numbers = self.rng.sample(range(max(100, count)), count)

        new_lines = []
        elements = []
        for line in lines:
            new_line = []
            for part in line:
                if isinstance(part, Element):
                    part = part._replace(number=numbers[len(elements)])
                    elements.append(part)
                new_line.append(part)
            new_lines.append(new_line)
        return new_lines, elements

    def respond(self, response: tuple[str, str], learned: bool = True):
        thought, action = response
        moment = Moment(
            page=self.text,
            thought=thought,
            action=action,
            task=self.task,
            wanted=self.wanted,
            learned=learned,
        )
        self.moments.append(moment)

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
                first = first_unsent(steps, i)
                if first == i and not self.approach(place, name):
                    return False
                i = first
                continue

            if action == "Carry":
                self.carried = f"the {name} is {argument} so"
            elif action and not self.do(action, name, argument):
                continue  # it is tried again
            i += 1

            refusal = self.site.refusal
            if refusal and refusal in self.text:
                return self.finish("N/A", f"{refusal} so it cannot be done")
        return True

    def approach(self, place: tuple, target: str) -> bool:
        """One action on the way to a place; False if there is none such."""
        kind, label, *rest = place
        if kind == "found":
            self.do("Search", self.site.search, label)
            return True
        if kind == "form":
            step = rest[0]
            self.do("Click", self.link_to_form(label, step))
            return True

        wanted = target if kind == "list" else rest[0]
        at_entry = self.at == ("entry", label, wanted)
        in_list = self.at[:2] == ("list", label)
        is_past = in_list and kind == "list" and self.at[2] >= rest[0]
        thought = ""
        if kind == "edit" and at_entry:
            name = self.site.sections[label].edit
        elif kind != "list" and wanted in self.seen:
            name = wanted
        elif in_list and not is_past:
            name = self.site.more
            thought = f"{wanted} is not here so"
            if name not in self.seen:
                return self.finish("N/A", f"{wanted} is not in {label}")
        elif label in self.seen:
            name = label
            thought = f"{wanted} is in {label} so"
        else:
            name = self.site.home
            thought = f"{label} is not here so"
        self.do("Click", name, thought=thought)
        return True

    def link_to_form(self, label: str, step: int) -> str:
        """What to click on the way to a step of a form: forward at the step before it, elsewhere the form's link."""
        form = self.site.forms[label]
        if step == 0 or self.at != ("form", label, step - 1):
            return label
        if step == 1 and form.before:
            return form.before
        return "continue"

    def do(
        self,
        action: str,
        name: str,
        argument: str | None = None,
        thought: str = "",
    ) -> bool:
        """False if something else happened."""
        if self.rng.random() < self.slips and len(self.moments) < 9:
            return self.slip(name)

        plans = {
            "Click": f"click {name}",
            "Type": f"type {argument} into {name}",
            "Search": f"search for {argument}",
            "Select Dropdown Option": f"choose {argument} as {name}",
        }
        reason = self.carried or thought
        self.carried = ""
        whole_thought = f"{reason} {plans[action]}".strip()
        element = self.seen[name]
        self.respond(act(whole_thought, action, element, argument))
        self.happen(action, element, argument)
        return True

    def happen(self, action: str, element: Element, argument: str | None = None):
        """What the site makes of an action: another page, or another value in a control."""
        if action == "Search":
            self.at = ("found", argument)
        elif action != "Click":
            self.site.typed[(*self.at, element.name)] = argument
        elif element.to[:1] == ("done",):
            self.site.send()
            _, self.at = element.to
            said = self.rng.choice(("", "", "saved", "thanks", f"{element.name} : done"))
            self.feedback = self.site.refusal or said
        elif element.to:
            self.at = element.to
            self.site.typed.clear()
        self.look()

    def slip(self, name: str) -> bool:
        """Something goes wrong: another link, or an id that the page does not have, as rollout.py reports it."""
        elements = self.seen.values()
        others = [each for each in elements if each.kind == "a" and each.name != name]
        inside_form = self.at[0] == "form" and self.at[2] > 0
        if others and self.rng.random() < 0.4 and not inside_form:
            other = self.rng.choice(others)
            self.respond(click(other), learned=False)
            self.happen("Click", other)
        else:
            unused = set(range(100)) - {each.number for each in elements}
            wrong = self.rng.choice(sorted(unused))
            element = self.seen[name]._replace(number=wrong)
            self.respond(click(element), learned=False)
            self.first_line = f"error: there is no element {wrong} on this page"
            self.look()
        return False

    # ---- what is asked: (instruction, steps, answer or None)
    # answer() gives (message, thought) on the last page.
    def ask(self, wordings: str, *words) -> str:
        """One of the wordings, with a word too many or too few now and then: what counts is in its slots."""
        wording = self.rng.choice(wordings.split("|"))
        out = []
        for word in wording.split():
            filler = self.rng.choice(FILLERS)
            if self.rng.random() < 0.12:
                out.append(filler)
            if "{" in word or self.rng.random() > 0.08:
                out.append(word)
        return " ".join(out).format(*words)

    def where(self, section: Section, name: str) -> str:
        """An entry as an instruction names it."""
        entry = f'"{name}"' if self.rng.random() < 0.15 else name
        return self.ask(
            "{0} in {1}|"
            "{0} under {1}|"
            "{0} from the {1}|"
            "the {1} entry {0}|"
            "{1} , {0}|"
            "{0} ( {1} )|"
            "the one called {0} in the section {1}",
            entry,
            section.label,
        )

    def target(self, absent: float = 0.1) -> tuple[Section, str, tuple]:
        """What a goal is about: the section, an entry's name and its page.

        `absent`: how often no section has such an entry.
        """
        section = self.section
        name = self.rng.choice(list(section.entries))
        if self.rng.random() < absent:
            while any(name in each.entries for each in self.site.sections.values()):
                new_name = name_maker(self.rng, 6)
                name = new_name()
        return section, name, ("entry", section.label, name)

    def fact(self):
        """A fact that an entry's page shows, or none such."""
        section, name, place = self.target()
        labels = section.labels if self.rng.random() < 0.9 else FACTS + DETAILS
        label = self.rng.choice(labels)
        task = self.ask(
            "tell the {} of {}|"
            "report the {} of {}|"
            "find out the {} of {}|"
            "give the {} of {}|"
            "i need to know the {} of {}|"
            "say which {} belongs to {}|"
            "which {} has {}|"
            "what {} is given for {}|"
            "how much or how many {} has {}",
            label,
            self.where(section, name),
        )
        return task, [Step(place)], self.reader(section, name, label)

    def reader(self, section: Section, name: str, label: str):
        """Reads a fact off an entry's page."""
        def answer():
            if label not in section.labels:
                return "N/A", f"no {label} is shown here"
            heading = self.text.index("\n# ")
            found = re.search(f"^{label} .*", self.text[heading:], re.MULTILINE)
            line = found[0]
            return section.entries[name][label], re.sub("</?a>", "", line)
        return answer

    def cell(self):
        """A fact that the list of entries shows."""
        section, name, _ = self.target(absent=0)
        if not section.columns:
            return self.fact()
        label = self.rng.choice(section.columns)
        task = self.ask(
            "read off the {} beside {}|"
            "look at the list and tell the {} of {}",
            label,
            self.where(section, name),
        )

        def answer():
            lines = self.text.split("\n")
            line = next(line for line in lines if line.startswith(f"<a>{name} "))
            value = section.entries[name][label]
            start = line.index(value, line.index("</a>"))
            end = start + len(value)
            return value, re.sub("</?[a-z]+>", "", line[:end])

        step = Step(section.page_of(name), name=name)
        return task, [step], answer

    def press(self):
        """A button on an entry's page."""
        section, name, place = self.target()
        button = self.rng.choice(section.buttons)
        verb = button.split()[0]
        task = self.ask(
            "press {0} for {1}|"
            "{2} {1}|"
            "press the button {0} on {1}|"
            "please {2} {1}|"
            "{2} {1} and nothing else",
            button,
            self.where(section, name),
            verb,
        )
        return task, [Step(place, "Click", button)], None

    def press_in_bar(self):
        """A button that every page has, and that leads home."""
        button = self.site.out
        if not button:
            return self.press()
        task = self.ask("press {0}|{0}|{0} the site|{0} of the site", button)
        anywhere = ()
        return task, [Step(anywhere, "Click", button)], None

    def press_in_row(self):
        """A button beside an entry in the list."""
        section, name, _ = self.target(absent=0)
        if not section.row_verb:
            return self.press()
        task = self.ask("{0} {1}|press {0} for {1}", section.row_verb, self.where(section, name))
        step = Step(section.page_of(name), "Click", f"{section.row_verb} {name}")
        return task, [step], None

    def write(self):
        """The menu, the field, or both on an entry's page, and then a button."""
        section, name, place = self.target()
        if not (section.field or section.menu):
            return self.press()

        steps = []
        parts = []
        if section.menu and (not section.field or self.rng.random() < 0.5):
            option = self.rng.choice(section.options[1:])
            steps.append(Step(place, "Select Dropdown Option", section.menu, option))
            shown = quoted(self.rng, option)
            wordings = "pick {0} as {1}|take {0} for {1}"
            parts.append(self.ask(wordings, shown, section.menu))
        if section.field:
            button = section.send
            text = phrase(self.rng)
            steps.append(Step(place, "Type", section.field, text))
            shown = quoted(self.rng, text)
            wordings = "write {0} as {1}|enter {0} into {1}|put {0} as {1}"
            parts.append(self.ask(wordings, shown, section.field))
        else:
            button = self.rng.choice(section.buttons)
        steps.append(Step(place, "Click", button))

        task = " and ".join(parts)
        task += f" {self.ask('for|on|of')}"
        task += f" {self.where(section, name)}"
        if not section.field:
            task += f" and press {button}"
        return task, steps, None

    def edit(self):
        """A fact of an entry, changed in a form."""
        section, name, _ = self.target()
        if not section.edit:
            return self.write()
        place = ("edit", section.label, name)
        label = self.rng.choice(section.editable)
        text = phrase(self.rng)
        task = self.ask(
            "correct the {1} of {2} to {0}|"
            "turn the {1} of {2} into {0}|"
            "enter {0} as {1} of {2}",
            quoted(self.rng, text),
            label,
            self.where(section, name),
        )
        steps = [
            Step(place, "Type", label, text),
            Step(place, "Click", "save"),
        ]
        return task, steps, None

    def fill(self, text: str = ""):
        """A form: one of its fields, or all. `text`: what to write there instead of something random."""
        label = self.rng.choice(list(self.site.forms))
        form = self.site.forms[label]
        asked = sum(form.pages, [])
        if text or self.rng.random() < 0.5:
            asked = [self.rng.choice(asked)]

        steps = []
        parts = []
        for index, fields in enumerate(form.pages):
            step = index + 1 if form.before else index
            place = ("form", label, step)
            for field in fields:
                if field not in asked:
                    continue
                words = text or phrase(self.rng)
                shown = quoted(self.rng, words)
                parts.append(self.ask("{0} as {1}|{1} {0}", shown, field))
                steps.append(Step(place, "Type", field, words))
            if form.menu and index == 0 and not text and self.rng.random() < 0.7:
                option = self.rng.choice(form.options[1:])
                parts.append(f"{quoted(self.rng, option)} as {form.menu}")
                steps.append(Step(place, "Select Dropdown Option", form.menu, option))
            is_last = index == len(form.pages) - 1
            button = form.last if is_last else "continue"
            steps.append(Step(place, "Click", button))

        task = self.ask(
            "fill in {1} with {0}|"
            "enter {0} in {1}|"
            "use {1} to give {0}|"
            "write {0} under {1}",
            " and ".join(parts),
            label,
        )
        return task, steps, None

    def look_up(self):
        """The search: how many entries it finds, or one of them, to read a fact there or press a button."""
        section, name, place = self.target(absent=0)
        if not self.site.search:
            return self.fact()
        if self.rng.random() < 0.4:
            query = self.rng.choice(name.split())
            return self.count_hits(query)

        query = self.rng.choice((name, name.split()[0]))
        if len(self.site.hits(query)) > 8:
            query = name
        label = self.rng.choice(section.labels)
        button = self.rng.choice(section.buttons)
        find = Step(("found", query), "Click", name)
        if self.rng.random() < 0.5:
            task = self.ask(
                "look up {0} and tell its {1}|"
                "use the search for {0} and report its {1}",
                quoted(self.rng, query),
                label,
            )
            return task, [find, Step(place)], self.reader(section, name, label)
        task = self.ask(
            "look up {0} and press {1}|"
            "use the search for {0} and {1}",
            quoted(self.rng, query),
            button,
        )
        return task, [find, Step(place, "Click", button)], None

    def count_hits(self, query: str):
        """How many entries the search finds."""
        task = self.ask(
            "look up {0} and count what is found|"
            "look up {0} and tell the number of results|"
            "use the search to count {0}",
            quoted(self.rng, query),
        )
        count = len(self.site.hits(query))

        def answer():
            return str(count), self.site.results(query)
        return task, [Step(("found", query))], answer

    def count(self):
        """How many entries the first page of the list has."""
        section = self.section
        names = list(section.entries)[:section.per_page]
        task = self.ask(
            "count the entries that the list of {} begins with|"
            "tell how long the first page of {} is",
            section.label,
        )
        counted = [f"{i} {name}" for i, name in enumerate(names, 1)]

        def answer():
            return str(len(names)), " ".join(counted)
        return task, [Step(("list", section.label, 0))], answer

    def carry(self):
        """Read here, write there."""
        section, name, place = self.target(absent=0)
        label = self.rng.choice(section.labels)
        value = section.entries[name][label]
        _, steps, _ = self.fill(value)
        typed = next(step for step in steps if step.action == "Type")
        form = typed.place[1]
        task = self.ask(
            "copy the {0} of {1} into {2} of {3}|"
            "put the {0} of {1} as {2} into {3}",
            label,
            self.where(section, name),
            typed.name,
            form,
        )
        read = Step(place, "Carry", label, value)
        return task, [read, *steps], None


def first_unsent(steps: list[Step], i: int) -> int:
    """The step to go back to from step i, when its page was left: what was typed there and not sent is lost."""
    page = steps[i].place[:2]
    while i > 0:
        before = steps[i - 1]
        if before.place[:2] != page or before.action in ("", "Click"):
            break
        i -= 1
    return i


def visit(rng: Random, goal: str = "") -> Visit:
    """A visit to a new site. One that is led astray by a name is drawn again."""
    drawn = Visit(rng, goal)
    while len(drawn.moments) > LONGEST:
        drawn = Visit(rng, goal)
    return drawn
