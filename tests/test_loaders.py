"""Damaged files: every reader gives a good value, or one sentence that names the file."""
import copy
import json
import random
import time

import pytest
import torch
from conftest import GOOD, make_task, target, tiny_config, tiny_model
from test_bc import RECORD

import evaluate
import mgrpo
from bc import read_demonstrations
from compress import open_chat, trajectory_rows
from model import load, load_tokenizer, save
from run import load_training, report, save_training, start_run
import worlds
from worlds import load_tasks, webarena
from worlds.browser import sites_of

FOREIGN = [None, True, False, 0, -1, 3, 0.5, "", "a", "../../etc/passwd", "é\u202e", "x" * 100,
           [], {}, [None], [[]], {"": {}}, [1] * 1000, {"a": {"b": [None, "c"]}}]


def places(value, path=()):
    """The paths of all values inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from places(child, (*path, key))


def change(value, rng):
    """Removes a value somewhere inside a JSON value, or puts another in its place."""
    value = copy.deepcopy(value)
    *path, last = rng.choice(list(places(value)))
    parent = value
    for key in path:
        parent = parent[key]
    if rng.random() < 0.3:
        del parent[last]
    else:
        parent[last] = rng.choice(FOREIGN)
    return value


def damage(data: bytes, rng) -> bytes:
    """What disks, networks and copies do to a file: cut it, flip bits, lose or repeat or zero a block."""
    at, length = rng.randrange(len(data) + 1), rng.randrange(1, 64)
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 9)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    block = [b"", data[at:at + length] * 2, bytes(length), rng.randbytes(length)][kind - 2]
    return data[:at] + block + data[at + length:]


def broken(data: bytes, rng) -> bytes:
    """A damaged file or, where it is JSON or begins with JSON, one with other values."""
    if rng.random() < 0.4:
        return damage(data, rng)
    if data[:1] not in b"{[":  # a safetensors file: its header then lies about its tensors
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(change(json.loads(data[8:8 + size]), rng)).encode()
        return len(header).to_bytes(8, "little") + header + data[8 + size:]
    lines = data.decode().splitlines() if data.count(b"\n{") else [data.decode()]
    i = rng.randrange(len(lines))
    lines[i] = json.dumps(change(json.loads(lines[i]), rng))
    return "\n".join(lines).encode() + b"\n"


def open_checkpoint(directory):
    open_chat(directory, "").message("user", "a red lamp")
    load(directory)


def open_tokenizer(directory):
    tokenizer = load_tokenizer(directory)
    tokenizer.decode(tokenizer.encode("a red lamp <|im_end|> é 5").ids)


def resume(directory):
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    load_training(directory / "state", model, optimizer)
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()


def clone(directory):
    chat = open_chat(directory, "")
    for trajectory in read_demonstrations(str(directory / "demos.jsonl"), chat):
        trajectory_rows(chat, trajectory)


def play(directory):
    sites = {name: "http://127.0.0.1:1" for name in webarena.HOSTS}
    sites_of(load_tasks(str(directory / "tasks.json"), sites, reach=False), "")
    worlds.validate(str(directory / "tasks.json"))


def continue_run(directory):
    start_run(mgrpo.Config(out=str(directory)), torch.device("cpu"), tiny_config(), first=2)
    report(directory)


def compare(directory):
    evaluate.compare([str(directory)])


CASES = {  # the file that is broken -> its reader
    "config.json": open_checkpoint, "tokenizer.json": open_tokenizer, "agent.json": open_checkpoint,
    "model.safetensors": open_checkpoint,
    "state/00001/state.json": resume, "state/00001/part-0.safetensors": resume, "demos.jsonl": clone,
    "tasks.json": play, "metrics.jsonl": continue_run, "trajectories.jsonl": continue_run,
    "summary.json": compare}


@pytest.fixture(scope="module")
def good(tokenizer, tmp_path_factory):
    """{name: content} of one good file of every kind."""
    path = tmp_path_factory.mktemp("good")
    model = tiny_model()
    save(model, path, run={"max_turns": 3})
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "agent.json").write_text(json.dumps({"system": "You browse.", "think": True, "compress": True}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    save_training(path / "state", model, optimizer, {"step": 3, "config": {"lr": 1e-3, "G": 8}})
    (path / "demos.jsonl").write_text(f"{json.dumps(RECORD)}\n{json.dumps(RECORD)}\n")
    pages = [target("last", "", must_include=["x"]),
             target("func:reddit_get_post_url('__last_url__')", "", exact_match="y")]
    everything = make_task(eval_types=["string_match", "url_match", "program_html"],
                           reference_url="__SHOPPING__/x", url_note="GOLD in PRED",
                           reference_answers={"must_include": ["a"], "required_values": ["> 3"]},
                           program_html=[page for each in pages for page in each["eval"]["program_html"]])
    (path / "tasks.json").write_text(json.dumps([GOOD, everything]))
    steps = [json.dumps({"step": i, "reward": 0.5, "kl": None}) for i in range(4)]
    (path / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    trajectory = RECORD | {"split": "train", "status": "ok", "checks": [], "answer": None, "member": 0}
    trajectories = [json.dumps(trajectory | {"step": i}) for i in range(4)]
    (path / "trajectories.jsonl").write_text("\n".join(trajectories) + "\n")
    figures = {"success_rate": 0.5, "ci95": [0.1, 0.9], "n": 4, "turns": 2.0}
    (path / "summary.json").write_text(json.dumps(figures | {"splits": {"sandbox:test": figures}}))
    for read in set(CASES.values()):
        read(path)
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.mark.parametrize("variants", [12, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_gives_one_sentence_that_names_it(name, variants, good, tmp_path, capfd):
    """And it hangs no reader: each takes less than 5 s of CPU."""
    read, rng, accepted, complaints = CASES[name], random.Random(name), 0, []
    for number in range(variants):
        for file, data in good.items():
            written = ("config.json", "metrics.jsonl", "trajectories.jsonl")  # by continue_run
            if number == 0 or read is continue_run and file in written:
                (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / file).write_bytes(data)
        (tmp_path / name).write_bytes(broken(good[name], rng))
        began, problem = time.process_time(), ""
        try:
            read(tmp_path)
            accepted += 1
        except ValueError as error:
            if "\n" in str(error) or str(tmp_path) not in str(error) or len(str(error)) > 600:
                problem = f"says {str(error)[:300]!r}"
        except BaseException as error:  # a panic in Rust is no Exception
            problem = f"raises {error!r:.300}"
        if time.process_time() - began > 5:
            problem = "hangs"
        if problem:
            complaints.append(f"variant {number} {problem}")
    capfd.readouterr()
    assert not complaints, "\n".join(complaints)
    assert accepted < variants * 0.9  # the variants are broken enough to test something
