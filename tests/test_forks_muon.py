"""Muon: its step against singular values, torch's own and AdamW's; interrupted and on two ranks."""
import json

import pytest
import torch
from conftest import tiny_model
from test_bc import RECORD
from test_scripts import ENV, read, script

import bc
from bc import Config
from forks import muon
from model import load, load_for_training


def matrix(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("rows, columns", [(32, 64), (64, 32), (96, 96)])
def test_a_step_has_the_directions_of_the_gradient_and_nearly_equal_lengths(rows, columns):
    given = matrix(rows, columns)
    step = muon.orthogonalize(given)

    U, S, V = torch.linalg.svd(given.double(), full_matrices=False)
    lengths = U.T @ step.double() @ V.T
    diagonal = lengths.diagonal()
    of_large = diagonal[S > 0.1 * S[0]]
    assert (of_large > 0.65).all()
    assert (of_large < 1.25).all()
    elsewhere = lengths - diagonal.diag()
    assert elsewhere.abs().max() < 1e-4  # the singular vectors stay what they were


def test_the_size_of_a_gradient_does_not_matter():
    given = matrix(32, 64)
    step = muon.orthogonalize(given)
    of_small = muon.orthogonalize(1e-3 * given)
    torch.testing.assert_close(step, of_small, rtol=1e-3, atol=1e-4)


def weights_of(model):
    return dict(model.named_parameters())


def test_matrices_step_as_torchs_muon_does_and_the_rest_as_adamw():
    """torch runs the iterations in bfloat16, hence two digits."""
    start = tiny_model(seed=3)
    ours = tiny_model(seed=3)
    theirs = tiny_model(seed=3)
    plain = tiny_model(seed=3)
    inside = [p for p in theirs.model.layers.parameters() if p.ndim == 2]
    torchs_muon = torch.optim.Muon(
        inside,
        lr=1e-2,
        weight_decay=0.0,
        momentum=muon.MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )
    optimizers = [
        (ours, muon.muon(ours, 1e-2)),
        (theirs, torchs_muon),
        (plain, bc.adamw(plain, 1e-2)),
    ]

    # Three steps, with the same gradients for all.
    for step in range(3):
        for one, optimizer in optimizers:
            for i, parameter in enumerate(one.parameters()):
                noise = torch.Generator().manual_seed(100 * step + i)
                parameter.grad = torch.randn(parameter.shape, generator=noise)
            optimizer.step()

    at_start = weights_of(start)
    by_torch = weights_of(theirs)
    by_adamw = weights_of(plain)
    matrices = 0
    for name, weight in ours.named_parameters():
        if "layers" in name and weight.ndim == 2:
            moved = (weight - at_start[name]).flatten()
            expected = (by_torch[name] - at_start[name]).flatten()
            similarity = torch.cosine_similarity(moved, expected, dim=0)
            assert similarity > 0.999, name
            ratio = moved.norm() / expected.norm()
            assert ratio.item() == pytest.approx(1, rel=0.02), name
            matrices += 1
        else:
            assert torch.equal(weight, by_adamw[name]), name
    assert matrices == 7 * ours.config.num_hidden_layers


def test_with_lora_it_moves_the_adapters_alone(checkpoint):
    """It once failed at the frozen weights, which have no gradient."""
    model = load_for_training(checkpoint, torch.device("cpu"), lora=4)
    start = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = muon.muon(model, 1e-2)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape)

    optimizer.step()

    for name, weight in model.named_parameters():
        frozen = "lora_" not in name
        assert torch.equal(weight, start[name]) == frozen, name


def test_it_has_a_folder_of_its_own():
    """With bc.py's default it wrote over the clone."""
    assert muon.Config().out == "runs/muon"


@pytest.fixture
def arguments(checkpoint, tmp_path):
    """The whole script on one demonstration, 12 steps."""
    demonstrations = tmp_path / "demos.jsonl"
    demonstrations.write_text(json.dumps(RECORD) + "\n")
    return {
        "model": str(checkpoint),
        "data": str(demonstrations),
        "epochs": 6,
        "batch": 1,
        "save_every": 3,
        "lr": 1e-2,
    }


def test_an_interrupted_run_continues_as_if_nothing_had_happened(arguments, tmp_path, monkeypatch):
    clone_batch = bc.clone_batch
    made = []

    def interrupted(*args, **more):
        made.append(0)
        if len(made) == 6:
            raise KeyboardInterrupt
        return clone_batch(*args, **more)

    bc.main(Config(**arguments, out=str(tmp_path / "whole")), muon.muon)
    monkeypatch.setattr(bc, "clone_batch", interrupted)
    cfg = Config(**arguments, out=str(tmp_path / "parts"))
    with pytest.raises(KeyboardInterrupt):
        bc.main(cfg, muon.muon)

    # Not by another optimizer, nor on other demonstrations.
    with pytest.raises(ValueError, match="the method Muon, not AdamW"):
        bc.main(cfg)
    demonstrations = tmp_path / "demos.jsonl"
    text = demonstrations.read_text()
    demonstrations.write_text(text + text)
    with pytest.raises(ValueError, match="other demonstrations in"):
        bc.main(cfg, muon.muon)
    demonstrations.write_text(text)

    cfg = Config(**arguments, out=str(tmp_path / "parts"))
    bc.main(cfg, muon.muon)
    assert len(made) == 6 + 12 - 3  # the sixth step broke off; the last save was after three

    whole = load(tmp_path / "whole").state_dict()
    parts = load(tmp_path / "parts").state_dict()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    losses = [line["loss"] for line in read(tmp_path / "whole/metrics.jsonl")]
    assert losses[-1] < 0.7 * losses[0]  # it learns


def test_two_ranks_do_what_one_does(arguments, tmp_path):
    """A rank holds a part of each matrix; a part has other singular values than the whole."""
    flags = []
    for key, value in arguments.items():
        flag = key.replace("_", "-")
        flags += [f"--{flag}", value]

    def weights_on(ranks):
        out = tmp_path / str(ranks)
        done = script("forks/muon.py", *flags, "--batch", 2, "--out", out, ranks=ranks, env=ENV)
        assert done.returncode == 0, done.stderr
        return load(out).state_dict()

    one = weights_on(1)
    two = weights_on(2)
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], atol=1e-3, rtol=1e-3, msg=name)


def test_matrices_follow_the_learning_rate_of_the_moment():
    """bc.py sets it before each step, for warmup and decay."""
    matrix = torch.nn.Parameter(torch.eye(3))
    optimizer = muon.Muon([matrix], 0.5, [matrix], betas=(0.9, 0.98), weight_decay=0.0)
    moved = []
    for lr in (0.0, 0.1, 0.2):
        before = matrix.detach().clone()
        optimizer.param_groups[0]["lr"] = lr
        matrix.grad = torch.eye(3)  # the same direction each time
        optimizer.step()
        moved.append((before - matrix).norm().item())
    assert moved[1] > 0
    assert moved == pytest.approx([0.0, moved[1], 2 * moved[1]])
