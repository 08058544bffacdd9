"""The small base's vocabulary and exercises."""
import json
import re
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import sandbox
from rollout import parse
from sandbox import exercises as ex

BASE = Path(ex.__file__).parent / "base"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(BASE / "tokenizer.json"))


@pytest.mark.parametrize("text", ["", " ", "red lamp 12", "  two  spaces\n\n\tand a tab ", "Ünïcödé 日本語 🙂", "a<b>c</d >&amp;<|im_end|>",
                                  "\x00\x7f", "x" * 300, '<a>order 17 7</a> $178 | 007', 'do(action="Click", element="5")',
                                  '# Element: a 1\n# Note: b'])
def test_any_text_comes_back_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_carries_its_space_and_numbers_stand_alone(tokenizer):
    shown = [tokenizer.decode([i]) for i in tokenizer.encode("<a>red lamp 12</a> $178\n").ids]
    assert shown == ["<a>", "red ", "lamp ", "12", "</a> ", "$", "17", "8", "\n"]


def test_the_committed_tokenizer_is_what_the_code_builds(tokenizer):
    assert json.loads(ex.tokenizer().to_str()) == json.loads(tokenizer.to_str())


def test_every_word_of_every_instruction_is_one_token(tokenizer):
    intents = [task["intent"] for split in ("train", "test", "test-unseen") for task in sandbox.tasks(split)]
    broken = {word for intent in intents for word in re.findall("[a-z]+", intent) for form in (word, word + " ")
              if len(tokenizer.encode(form).ids) > 1}
    assert not broken, "add them to exercises.OTHER and train the base again"


def test_responses_name_what_is_on_the_page():
    """Whatever is called by id carries that name and id on the page, and whatever is answered stands there or in the task."""
    for record in islice(ex.exercises(7), 400):
        for turn, kind in zip(record["turns"], record["template"].split("+") * (1 if "visit" != record["template"] else 20)):
            if turn["observation"] is None:  # a slip: it stands in the history and is not learned
                continue
            for name, number in re.findall(r"# Element: (.*) (\d+)$", turn["response"], re.M):
                assert re.search(f">{re.escape(name)} {number}( = [^<]*)?</", turn["observation"])
            if kind in ex.FULL:
                call = parse(turn["response"])
                if kind in ("fact", "beside", "value"):
                    assert call.argument in turn["observation"]
                elif call.argument is not None and kind != "present":
                    assert call.argument in record["intent"]


def test_same_seed_same_rows_and_no_task_among_them():
    rows = list(islice(ex.exercises(3), 300))
    assert rows == list(islice(ex.exercises(3), 300)) != list(islice(ex.exercises(4), 300))
    openings = {" ".join(task["intent"].split()[:2]) for split in ("train", "test-unseen") for task in sandbox.tasks(split)}
    instructions = [part for row in rows for part in row["intent"].split(" , then ")]
    assert not [i for i in instructions if " ".join(i.split()[:2]) in openings]
