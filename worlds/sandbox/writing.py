"""What exercises are written with: random content, elements as an observation shows them, responses in three manners.

A response is a thought and an action. The manner decides how the thought is written down: as it is (short), not at all
(none), or as the end of a long chain of thought (long). The long one says the task, what it names, what the page is, what
of it the page shows, what is missing, and what was done, all from the same facts; `Voice` draws its wording.
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
        shown = f"{self.value} ({' | '.join(self.options)})" if self.options else self.value
        text = f"<{self.kind}>{self.title}{shown and ' = ' + shown}</{self.kind}>"
        return f"{text} {self.beside}" if self.beside else text


# ---- content


def draw(rng: Random, shares: dict):
    return rng.choices(list(shares), list(shares.values()))[0]


def maybe(rng: Random, share: float, value, otherwise=""):
    return value if rng.random() < share else otherwise


def unknown(rng: Random) -> str:
    """A word that is none of the vocabulary: one token a letter."""
    syllable = lambda: rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiouy")
    word = "".join(syllable() for _ in range(rng.randint(1, 3))) + rng.choice("nrstlxm ").strip()
    return rng.choice((word, word, word, f"{word}{rng.randint(1, 99)}", f"{word}-{rng.choice(NOUNS)}"))


def number(rng: Random) -> str:
    """Of one to four digits, each length as often."""
    digits = rng.randint(1, 4)
    return str(rng.randint(10 ** (digits - 1), 10 ** digits - 1))


def name_maker(rng: Random, size: int, words: int = 2):
    """Draws two-word names from so few words that both words of a name occur in others; or names of one word."""
    if words == 1:
        some = rng.sample(ADJECTIVES + THINGS + NAMES + CITIES, size + 2)
        return lambda: rng.choice(some)
    firsts = rng.sample(ADJECTIVES, max(2, size // 2))
    seconds = rng.sample(THINGS, max(2, size // 2 + 1))
    if rng.random() < 0.15:
        seconds = seconds[:1] + [unknown(rng) for _ in seconds[1:]]
    return lambda: f"{rng.choice(firsts)} {rng.choice(seconds)}"


def phrase(rng: Random) -> str:
    """A text to type: one to six words, or a number."""
    words = ADJECTIVES + SCENERY + TOPICS + OTHER + MORE
    return rng.choice((lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}",
                       lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(THINGS)}",
                       lambda: rng.choice(NAMES + CITIES + ADJECTIVES + SCENERY),
                       lambda: number(rng), lambda: unknown(rng),
                       lambda: " ".join(rng.sample(words, rng.randint(2, 6))),
                       lambda: f"{rng.choice(words)} {unknown(rng)}"))()


def quoted(rng: Random, text: str) -> str:
    """In quotes, unless it is short and plain enough to end by itself."""
    plain = len(text.split()) < 3 and not {*FILLERS, *OTHER, *MORE} & {*text.split()}
    return text if plain and rng.random() < 0.3 else f'"{text}"'


def kind_of_value(rng: Random):
    """Draws what stands beside a name or behind a label, all of one kind."""
    states = rng.choice(list(MENUS.values())).split()
    return rng.choice((lambda: f"${number(rng)}", lambda: f"${rng.randint(1, 99)}",
                       lambda: number(rng), lambda: str(rng.randint(0, 99)),
                       lambda: rng.choice(states), lambda: f"{rng.randint(1, 31)} {rng.choice(MONTHS)}",
                       lambda: rng.choice(NAMES), lambda: rng.choice(CITIES), lambda: unknown(rng),
                       lambda: f"{rng.choice(ADJECTIVES)} {rng.choice(SCENERY)}"))


def some_value(rng: Random) -> str:
    return kind_of_value(rng)()


# ---- responses: (thought, action)


def element_line(e: Element) -> str:
    return f"# Element: {e.title}"


def act(thought: str, action: str, e: Element, argument: str | None = None) -> tuple[str, str]:
    words = "" if argument is None else f'argument="{argument}", '
    call = f'do(action="{action}", {words}element="{e.number}")'
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
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text)


def named_in(task: str, words) -> list[str]:
    """Those of the words that the task names, in its order."""
    found = {each: match.start() for each in words if each and (match := stands_in(each, task))}
    return sorted(found, key=found.get)


def step_of(thought: str) -> str:
    """What was done, without the reason for it."""
    return thought.rpartition(" so ")[2]


class Voice:
    """How somebody words long chains of thought: drawn once an episode, so that only its first turn is a surprise."""

    def __init__(self, rng: Random):
        self.words = {part: rng.choice(wordings) for part, wordings in WORDINGS.items()}

    def say(self, part: str, *what: str) -> str:
        return self.words[part].format(" and ".join(what) or "nothing")

    def think(self, moment: Moment, told: list[str]) -> str:
        """The long chain of thought. `told`: the steps before, of which it repeats the last two."""
        title = re.search("^title: (.*)$", moment.page, re.MULTILINE)
        shown = [each for each in moment.wanted if stands_in(each, moment.page)]
        missing = [each for each in moment.wanted if each not in shown]
        parts = [self.say("task", moment.task)]
        if 0 < len(" ".join(moment.wanted).split()) <= 6:  # more is said below, and a small model cannot write for ever
            parts.append(self.say("wanted", *moment.wanted))
        parts += [self.say("failed")] * moment.page.startswith("error: ")
        parts.append(self.say("page", title[1] if title else ""))
        if moment.wanted:
            parts += [self.say("shown", *shown), self.say("missing", *missing)]
        parts.append(self.say("told", " , ".join(told[-2:])) if told else self.say("first"))
        return " . ".join([*parts, self.say("next", moment.thought)])


def written(moments: list[Moment], manner: str, voice: Voice) -> list[dict]:
    """The turns of a record, every thought in the manner: "short", "none" or "long"."""
    turns, told = [], []
    for moment in moments:
        thought = voice.think(moment, told) if manner == "long" else moment.thought
        told.append(step_of(moment.thought))
        response = moment.action if manner == "none" else f"<think>{thought}</think><answer>{moment.action}</answer>"
        turns.append({"url": "about:blank", "observation": moment.page if moment.learned else None, "response": response})
    return turns
