"""Every reader against damaged, foreign and hostile files: a good value, or one sentence that names the file."""
import copy
import json
import random
import resource
import time

import pytest
import torch
from conftest import tiny_config, tiny_model

import evaluate
import mgrpo
from bc import read_demonstrations
from compress import open_chat, replay, rows
from evaluate import load_tasks, report, start_run
from model import load, load_tokenizer, load_training, save, save_training
from rollout import sites_of
from worlds import webarena
from test_bc import RECORD
from test_evaluate import GOOD, make_task, target

HOSTILE = [None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 2 ** 31, 2 ** 63, 10 ** 30, 10 ** 400,
           "", "0", "a", "../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "é\u202e", "x" * 20000, [], {}, [None], [[]], {"": {}},
           [1] * 1000, {"a": {"b": [None, "c"]}}]
DEEP = '{"a": [' * 3000 + "]}" * 3000


def nodes(value, path=()):
    """The paths of all values inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield from nodes(child, (*path, key))


def change(value, rng):
    """One place of a JSON value made hostile, removed, renamed, or exchanged with another."""
    value = copy.deepcopy(value)
    path = rng.choice(list(nodes(value)))
    if not path:
        return rng.choice(HOSTILE)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    kind = rng.randrange(8)
    if kind == 0:
        del parent[path[-1]]
    elif kind == 1 and isinstance(parent, dict):
        parent[rng.choice(["", "a", "__class__", path[-1] + " "])] = parent.pop(path[-1])
    elif kind == 2:
        parent[path[-1]] = [parent[path[-1]]]
    elif kind == 3:
        parent[path[-1]] = copy.deepcopy(value)
    else:
        parent[path[-1]] = rng.choice(HOSTILE)
    return value


def damage(data: bytes, rng) -> bytes:
    """What disks, networks and copies do to a file: cut, bits turned, a block lost, doubled, zeroed, or foreign."""
    at, length = rng.randrange(len(data) + 1), rng.randrange(1, 64)
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        turned = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            turned[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(turned)
    middle = [b"", data[at:at + length] * 2, bytes(length), rng.randbytes(length), b'"a": null, ' * 2][kind - 2]
    return data[:at] + middle + data[at + length:]


def broken(data: bytes, rng) -> bytes:
    """A variant of a file: damaged as bytes or, where it is JSON (lines), hostile as values."""
    kind = rng.randrange(10)
    if kind == 0:
        return DEEP.encode()
    if kind < 4 or data[:1] not in b"{[":
        return damage(data, rng)
    lines = data.decode().splitlines() if data.count(b"\n{") else [data.decode()]
    i = rng.randrange(len(lines))
    lines[i] = json.dumps(change(json.loads(lines[i]), rng))
    if kind == 4:  # a key twice
        lines[i] = lines[i].replace("{", '{"vocab_size": -1, "task_id": [], "turns": 3, ', 1)
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def header_lies(data: bytes, rng) -> bytes:
    """A safetensors file whose header says something else than its tensors."""
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(change(json.loads(data[8:8 + size]), rng)).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + data[8 + size:]


def open_checkpoint(directory):
    chat = open_chat(load_tokenizer(directory), directory, "")
    model = load(directory)
    ids = chat.message("user", "a red lamp <|im_end|> é 5") + chat.opening("assistant")
    chat.decode(ids)
    model(torch.tensor([ids]))


def resume(directory):
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    assert mgrpo.resume(mgrpo.Config(out=str(directory), force=True), model, optimizer, set()) >= 0
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()


def clone(directory):
    chat = open_chat(load_tokenizer(directory), directory, "")
    for record in read_demonstrations(str(directory / "demos.jsonl")):
        rows(chat, replay(chat, record))


def play(directory):
    tasks = load_tasks(str(directory / "tasks.json"), {name: "http://127.0.0.1:1" for name in webarena.HOSTS}, reach=False)
    sites_of(tasks, "")
    evaluate.validate(str(directory / "tasks.json"))


def go_on(directory):
    start_run(mgrpo.Config(out=str(directory)), torch.device("cpu"), tiny_config(), first=2)
    report(directory)


def compare(directory):
    evaluate.compare([str(directory)])


CASES = {  # the file that is broken: how it is read, how many variants
    "config.json": (open_checkpoint, 500), "tokenizer.json": (open_checkpoint, 300), "agent.json": (open_checkpoint, 100),
    "model-00001-of-00002.safetensors": (open_checkpoint, 200), "model.safetensors.index.json": (open_checkpoint, 150),
    "state/state.json": (resume, 150), "state/part-0.safetensors": (resume, 150),
    "demos.jsonl": (clone, 200), "tasks.json": (play, 400), "metrics.jsonl": (go_on, 100), "trajectories.jsonl": (go_on, 100),
    "summary.json": (compare, 100)}


@pytest.fixture(scope="module")
def good(tokenizer, tmp_path_factory):
    """A directory with one good file of every kind."""
    path = tmp_path_factory.mktemp("good")
    model = tiny_model()
    save(model, path, max_bytes=80_000, run={"max_turns": 3})
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "agent.json").write_text(json.dumps({"system": "You browse.", "think": True, "compress": True}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    save_training(path / "state", model, optimizer, {"step": 3, "config": {"lr": 1e-3, "G": 8}})
    (path / "demos.jsonl").write_text(f"{json.dumps(RECORD)}\n{json.dumps(RECORD)}\n")
    everything = make_task(eval_types=["string_match", "url_match", "program_html"], reference_url="__SHOPPING__/x",
                           url_note="GOLD in PRED", reference_answers={"must_include": ["a"], "required_values": ["> 3"]},
                           program_html=target("last", "", must_include=["x"])["eval"]["program_html"]
                           + target("func:reddit_get_post_url('__last_url__')", "", exact_match="y")["eval"]["program_html"])
    (path / "tasks.json").write_text(json.dumps([GOOD, everything]))
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "reward": 0.5, "kl": None}) + "\n" for i in range(4)))
    trajectory = RECORD | {"step": 1, "split": "train", "status": "ok", "checks": [], "answer": None, "member": 0}
    (path / "trajectories.jsonl").write_text("".join(json.dumps(trajectory | {"step": i}) + "\n" for i in range(4)))
    figures = {"success_rate": 0.5, "ci95": [0.1, 0.9], "n": 4, "turns": 2.0}
    (path / "summary.json").write_text(json.dumps(figures | {"splits": {"sandbox:test": figures}}))
    for read in {read for read, _ in CASES.values()}:
        read(path)
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_no_file_however_broken_gives_more_than_one_sentence(name, good, tmp_path, capfd):
    """Also no hang (5 s of CPU) and no memory beyond 500 MB."""
    read, variants = CASES[name]
    rng, accepted, complaints = random.Random(name), 0, []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(variants):
        for file, data in good.items():
            if number == 0 or read is go_on:  # the only reader that also writes
                (tmp_path / file).parent.mkdir(exist_ok=True)
                (tmp_path / file).write_bytes(data)
        spoil = header_lies if name.endswith(".safetensors") and number % 2 else broken
        (tmp_path / name).write_bytes(spoil(good[name], rng))
        began, problem = time.process_time(), ""
        try:
            read(tmp_path)
            accepted += 1
        except ValueError as error:
            if "\n" in str(error) or str(tmp_path) not in str(error) or len(str(error)) > 600:
                problem = f"says {str(error)[:300]!r}"
        except BaseException as error:  # what the Rust side throws in a panic is no Exception
            problem = f"raises {error!r:.300}"
        if time.process_time() - began > 5:
            problem = "hangs"
        if problem:
            complaints.append(f"variant {number} {problem}")
    capfd.readouterr()
    assert not complaints, "\n".join(complaints)
    assert accepted < variants * 0.9  # the variants are broken enough to test something
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
