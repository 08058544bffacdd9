"""What exercises are written with: random content, elements as an observation shows them, responses in three manners.

A response is a thought and an action. The manner decides how the thought is written down: as it is
(short), not at all (none), or as the end of a long chain of thought (long). The long one says the
task, what it names, what the page is, what of it the page shows, what is missing, and what was
done, all from the same facts; `Voice` draws its wording.
"""
import re
from random import Random
from typing import NamedTuple

from .vocabulary import FILLERS, MENUS, MORE, OTHER, with_id
from .words import ADJECTIVES, CITIES, MONTHS, NAMES, NOUNS, SCENERY, TOPICS

THINGS = NOUNS + TOPICS


class Element(NamedTuple):
    kind: str
    name: str
    value: str = ""      # what a control holds
    options: tuple = ()  # of a select
    beside: str = ""     # what stands behind it on its line
    to: tuple = ()       # where it leads, on a website
    number: int = -1

    @property
    def title(self) -> str:
        """Name and id, as observations and responses write them."""
        return with_id(self.name, self.number)

    def html(self) -> str:
        """The element as a simplified page shows it, with what stands beside it."""
        shown = self.value
        if self.options:
            menu = " | ".join(self.options)
            shown = f"{self.value} ({menu})"

        content = self.title
        if shown:
            content += f" = {shown}"

        text = f"<{self.kind}>{content}</{self.kind}>"
        if self.beside:
            text += f" {self.beside}"
        return text


# ---- content


def draw(rng: Random, shares: dict):
    """One of the keys, each as often as its share says."""
    keys = list(shares)
    weights = list(shares.values())
    return rng.choices(keys, weights)[0]


def maybe(rng: Random, share: float, value, otherwise=""):
    """The value in this share of cases."""
    if rng.random() < share:
        return value
    return otherwise


def unknown(rng: Random) -> str:
    """A word that is none of the vocabulary: one token a letter."""
    word = ""
    for _ in range(rng.randint(1, 3)):
        word += rng.choice("bcdfghjklmnprstvwz")
        word += rng.choice("aeiouy")
    word += rng.choice("nrstlxm ").strip()

    numbered = f"{word}{rng.randint(1, 99)}"
    joined = f"{word}-{rng.choice(NOUNS)}"
    return rng.choice((word, word, word, numbered, joined))


def number(rng: Random) -> str:
    """Of one to four digits, each length as often."""
    digits = rng.randint(1, 4)
    smallest = 10 ** (digits - 1)
    largest = 10 ** digits - 1
    return str(rng.randint(smallest, largest))


def name_maker(rng: Random, size: int, words: int = 2):
    """A function that draws names: of two words, or of one.

    The two words come from so few that both words of a name occur in others.
    """
    if words == 1:
        some = rng.sample(ADJECTIVES + THINGS + NAMES + CITIES, size + 2)
        return lambda: rng.choice(some)

    firsts = rng.sample(ADJECTIVES, max(2, size // 2))
    seconds = rng.sample(THINGS, max(2, size // 2 + 1))
    if rng.random() < 0.15:
        known = seconds[:1]
        seconds = known + [unknown(rng) for _ in seconds[1:]]
    return lambda: f"{rng.choice(firsts)} {rng.choice(seconds)}"


def scene(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}"


def phrase(rng: Random) -> str:
    """A text to type: one to six words, or a number."""
    words = ADJECTIVES + SCENERY + TOPICS + OTHER + MORE
    form = rng.choice(("scene", "thing", "word", "number", "unknown", "sentence", "half known"))
    if form == "scene":
        return scene(rng)
    if form == "thing":
        return f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}"
    if form == "word":
        return rng.choice(NAMES + CITIES + ADJECTIVES + SCENERY)
    if form == "number":
        return number(rng)
    if form == "unknown":
        return unknown(rng)
    if form == "sentence":
        length = rng.randint(2, 6)
        return " ".join(rng.sample(words, length))
    return f"{rng.choice(words)} {unknown(rng)}"


def quoted(rng: Random, text: str) -> str:
    """In quotes, unless it is short and plain enough to end by itself."""
    words = text.split()
    short = len(words) < 3
    plain = set(FILLERS + OTHER + MORE).isdisjoint(words)
    if short and plain and rng.random() < 0.3:
        return text
    return f'"{text}"'


def kind_of_value(rng: Random):
    """A function that draws what stands beside a name or behind a label, all of one kind."""
    menu = rng.choice(list(MENUS.values()))
    states = menu.split()
    makers = (
        lambda: f"${number(rng)}",
        lambda: f"${rng.randint(1, 99)}",
        lambda: number(rng),
        lambda: str(rng.randint(0, 99)),
        lambda: rng.choice(states),
        lambda: f"{rng.randint(1, 31)} {rng.choice(MONTHS)}",
        lambda: rng.choice(NAMES),
        lambda: rng.choice(CITIES),
        lambda: unknown(rng),
        lambda: scene(rng),
    )
    return rng.choice(makers)


def some_value(rng: Random) -> str:
    make = kind_of_value(rng)
    return make()


# ---- responses: (thought, action)


def element_line(e: Element) -> str:
    return f"# Element: {e.title}"


def act(thought: str, action: str, e: Element,
        argument: str | None = None) -> tuple[str, str]:
    """An action on an element, after a comment that names it: the id is copied from there."""
    parts = [f'action="{action}"']
    if argument is not None:
        parts.append(f'argument="{argument}"')
    parts.append(f'element="{e.number}"')

    call = f"do({', '.join(parts)})"
    return thought, f"{element_line(e)}\n{call}"


def click(e: Element) -> tuple[str, str]:
    return act(f"click {e.name}", "Click", e)


def say(text: str, thought: str = "") -> tuple[str, str]:
    """Thoughts quote the page up to the answer: reading is then copying on from a name, as pointing is."""
    return thought or text, f'exit(message="{text}")'


# ---- manners


class Moment(NamedTuple):
    """One turn, before it is written down in a manner."""
    page: str
    thought: str
    action: str
    task: str          # the part of the instruction that this turn is about
    wanted: list[str]  # what that part names
    learned: bool = True


WORDINGS = {
    "task": ("the task is : {}", "i have to do this : {}", "this is what i need to do : {}", "asked is : {}"),
    "wanted": ("it names {}", "so i look for {}", "what i need is {}", "that is about {}"),
    "page": ("now i see the page {}", "this is the page {}", "the page before me is {}", "i am on {}"),
    "shown": ("it shows {}", "here i find {}", "the page holds {}"),
    "missing": ("what is missing is {}", "but not {}", "not here : {}"),
    "told": ("done so far : {}", "before this i did : {}", "so far : {}"),
    "first": ("nothing is done yet", "this is the first step", "so far nothing"),
    "failed": ("the last step was wrong", "that did not work", "there was an error"),
    "next": ("so the next step is : {}", "so now : {}", "what to do next : {}", "so i do this : {}"),
}


def stands_in(words: str, text: str) -> re.Match | None:
    """Where the words stand in the text as whole words, if they do."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text)


def named_in(task: str, words) -> list[str]:
    """Those of the words that the task names, in its order."""
    positions = {}
    for each in words:
        if not each:
            continue
        match = stands_in(each, task)
        if match:
            positions[each] = match.start()
    return sorted(positions, key=positions.get)


def step_of(thought: str) -> str:
    """What was done, without the reason for it."""
    return thought.rpartition(" so ")[2]


class Voice:
    """How somebody words long chains of thought: drawn once an episode, so that only its first turn is a surprise."""

    def __init__(self, rng: Random):
        self.words = {}
        for part, wordings in WORDINGS.items():
            self.words[part] = rng.choice(wordings)

    def say(self, part: str, *what: str) -> str:
        """One part of a thought in this voice, about these things."""
        things = " and ".join(what) or "nothing"
        return self.words[part].format(things)

    def think(self, moment: Moment, told: list[str]) -> str:
        """The long chain of thought. `told`: the steps before, of which it repeats the last two."""
        parts = [self.say("task", moment.task)]

        n_words = len(" ".join(moment.wanted).split())
        if 0 < n_words <= 6:  # more is said below, and a small model cannot write for ever
            parts.append(self.say("wanted", *moment.wanted))

        if moment.page.startswith("error: "):
            parts.append(self.say("failed"))
        title = re.search("^title: (.*)$", moment.page, re.MULTILINE)
        parts.append(self.say("page", title[1] if title else ""))

        if moment.wanted:
            shown = [each for each in moment.wanted if stands_in(each, moment.page)]
            missing = [each for each in moment.wanted if each not in shown]
            parts.append(self.say("shown", *shown))
            parts.append(self.say("missing", *missing))

        if told:
            steps = " , ".join(told[-2:])
            parts.append(self.say("told", steps))
        else:
            parts.append(self.say("first"))
        parts.append(self.say("next", moment.thought))
        return " . ".join(parts)


def written(moments: list[Moment], manner: str, voice: Voice) -> list[dict]:
    """The turns of a record, every thought in the manner: "short", "none" or "long"."""
    turns = []
    told = []
    for moment in moments:
        thought = moment.thought
        if manner == "long":
            thought = voice.think(moment, told)
        told.append(step_of(moment.thought))

        response = f"<think>{thought}</think><answer>{moment.action}</answer>"
        if manner == "none":
            response = moment.action
        turns.append({
            "url": "about:blank",
            "observation": moment.page if moment.learned else None,
            "response": response,
        })
    return turns
