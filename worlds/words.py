"""The benchmark's words: how nltk 3.8.1's word_tokenize cuts text in lower case.

A reference of one word must be a word of the answer or page, so the cuts decide what passes. nltk
first finds the sentences, because a full stop is a word of its own only at the end of one. Then it
puts spaces around punctuation, in a fixed order. tests/golden/words.json holds random texts with
nltk's words. Four differences remain:

    - nltk's model has 156 abbreviations, ABBREVIATIONS has only the usual ones.
    - If . ? or ! is the first character after a space and one of )";}]*:@'({[ follows, nltk ends a
      sentence there even if another one ends before the next space.
    - nltk starts a sentence with "administrators" after a number or an initial.
    - nltk cuts both halves of "'tis'twas".
"""
import re

ABBREVIATIONS = set("""a.m aug ave bros c calif co col conn corp ct d d.c dec dr e f feb fla fri ft
    g ga gen h ill inc jan jr k ky l l.a ltd m mich minn mr mrs ms n n.j n.y nov oct ok p p.m pa
    ph.d prof r rep s sen sep sept sr st t tenn tues u.k u.n u.s u.s.a v va vs w wash wed wis
    yr""".split())

STOP = r"""[)";}\]*:@'({\[?!]"""  # ends a word, besides spaces
# A run's (without spaces) last . ? or ! that one of these follows, or spaces and a word.
CANDIDATE = re.compile(rf"(?<![^ \t\n\r\f\v])[^ \t\n\r\f\v]*[.?!](?=({STOP}|\s+\S+))")
TOKEN = re.compile(rf"""--+ | \.\.+
                        | (?![-("`{{[:;&\#*@)}}\],])\S+?(?=,?(?:\s|$|{STOP}|--|\.\.))
                        | \S""", re.VERBOSE)
NUMBER_OR_INITIAL = re.compile(r"-?[.,]?\d[\d,.-]*|[^\W\d]")
CLOSING = re.compile(r"""(?:\s*["')\]}]+?(?=\s|--|$))?\s*""")  # these still belong to the sentence


def ends_sentence(token: str, following: str) -> bool:
    if token in (".", "?", "!"):
        return True
    word = token.removesuffix(".")
    if word == token or word.endswith("."):  # no full stop, or several
        return False
    last_part = word.split("-")[-1]
    if word in ABBREVIATIONS or last_part in ABBREVIATIONS:
        return False
    if NUMBER_OR_INITIAL.fullmatch(word):  # "the 5. floor", "j. bach": does the sentence go on?
        return not (following in ";:,.!?" or following[0].islower())
    return True


def sentences(text: str):
    start = 0
    for found in CANDIDATE.finditer(text):
        tokens = TOKEN.findall(found[0] + found[1])
        if any(map(ends_sentence, tokens, tokens[1:])):
            end = CLOSING.match(text, found.end()).end()
            yield text[start:end].rstrip()
            start = end
    yield text[start:].rstrip()


SUBSTITUTIONS = [(re.compile(pattern), replacement) for pattern, replacement in (
    (r"[«“‘„]|``?", r" \g<0> "),
    (r'^"', " `` "),                                           # opening double quotes
    (r"""(?<=[ ([{<])(?:"|'')""", " `` "),
    (r"'(?![mtsdn])(\w)\b", r"' \1"),                          # o'b, but neither o'brien nor it's
    (r"""(?<=[^.])\.(?=[])}>"'»”’ ]*$)""", " . "),             # the sentence's last full stop
    (r"([:,])(\D|$)", r" \1 \2"),                              # not in 10:30 or 1,000
    (r"\.\.+|[;@#$%&?!]", r" \g<0> "),
    (r"(?<=[^'])'(?= )", " ' "),
    (r"--|''|[][(){}<>*»”’]", r" \g<0> "),
    (r'"', " '' "),                                            # closing double quotes
    (r"(?<=[^' ])'[smd]?(?= |$)", r" \g<0> "),                 # it's
    (r"(?<=[^' ])('ll|'re|'ve|n't)(?= |$)", r" \g<0> "),       # don't
    (r"\b(can(?=not\b)|gon(?=na\b)|got(?=ta\b)|(?:gim|lem)(?=me\b)|wan(?=na(?:\s|$))|d(?='ye\b)"
     r"|more(?='n\b))('?\w+)", r" \1 \2 "),
    (r"(?:^| )('t)(is|was)\b", r" \1 \2 "))]


def words(text: str) -> list[str]:
    found = []
    for sentence in sentences(text):
        for pattern, replacement in SUBSTITUTIONS:
            sentence = pattern.sub(replacement, sentence)
        found += sentence.split()
    return found
