"""Muon: a fork of bc.py whose matrices take orthogonal steps.

    M_t = mu M_{t-1} + G_t                          momentum of the gradient G_t
    U S V^T = G_t + mu M_t                          a look ahead (Nesterov), and its singular values S
    W_t = W_{t-1} - lr 0.2 sqrt(max(R, C)) U V^T    every direction moves about equally far, whatever its S

Muon (Jordan et al. 2024) updates the matrices inside the blocks, (R, C): all of them, or with --lora only the
adapters. AdamW keeps the embedding, the head, norms and biases. The factor 0.2 sqrt(max(R, C)) makes an entry's
step about as long as AdamW's, so one --lr drives both ("Muon is Scalable for LLM Training", Liu et al. 2025, arXiv
2502.16982). U V^T comes from five Newton-Schulz iterations, which bring most singular values of a well-conditioned
matrix to between 0.7 and 1.2 rather than to 1.

`make base` pre-trains the small base with it, but for the first stage: see assets/decisions.md for its losses and
AdamW's.

    python forks/muon.py --model runs/base-0 --data runs/exercises.jsonl --lr 4e-3

Differs from its sources: no weight decay, and the iterations run in the gradient's precision, not in bfloat16.

Differs from bc.py: the optimizer.
"""
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where bc.py is
import run  # before torch

import torch

import bc
from model import gathered

MOMENTUM = 0.95


@dataclass
class Config(bc.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/muon"       # the run's directory; at the end it is also the checkpoint


def orthogonalize(matrix_RC):
    """U V^T of a matrix U S V^T, roughly: five iterations of x -> 3.4445 x - 4.7750 x^3 + 2.0315 x^5 on S."""
    R, C = matrix_RC.shape
    if R > C:
        return orthogonalize(matrix_RC.T).T  # products of the shorter side are smaller
    X = matrix_RC / (matrix_RC.norm() + 1e-7)  # now no singular value exceeds 1
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


class Muon(torch.optim.AdamW):
    """AdamW, except for `matrices`. Its state keeps AdamW's names, so that run.py saves it: exp_avg is M_t."""

    def __init__(self, parameters, lr: float, matrices: list, **adamw):
        super().__init__(parameters, lr, **adamw)
        self.matrices = matrices

    @torch.no_grad()
    def step(self):
        lr = self.param_groups[0]["lr"]
        for matrix in self.matrices:
            state = self.state[matrix]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(matrix)
                state["exp_avg_sq"] = torch.zeros_like(matrix)  # stays zero: run.py saves AdamW's states
            state["step"] += 1
            momentum = state["exp_avg"]
            momentum.mul_(MOMENTUM).add_(matrix.grad)
            ahead = matrix.grad + MOMENTUM * momentum
            length = 0.2 * math.sqrt(max(matrix.shape))
            direction = orthogonalize(gathered(ahead))  # the whole: a part has other singular values
            stepped = gathered(matrix) - lr * length * direction
            run.fill(matrix, stepped)
            matrix.grad = None  # AdamW passes over it
        super().step()


def muon(model, lr: float):
    """bc.py's optimizer, with Muon for the matrices inside the blocks."""
    inside = model.model.layers.parameters()
    matrices = [parameter for parameter in inside if parameter.ndim == 2 and parameter.requires_grad]
    return Muon(model.parameters(), lr, matrices, betas=(0.9, 0.98), weight_decay=0.0)


if __name__ == "__main__":
    main = partial(bc.main, make_optimizer=muon)
    run.command_line(main, Config, __doc__, {"paper": bc.PAPER})
