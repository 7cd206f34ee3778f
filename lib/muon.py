"""Muon: an optimizer for the matrices of a transformer, with AdamW for everything else."""

import math

import torch

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of X <- a X + (b A + c A A) X with A = X X^T
STEPS = 5
MOMENTUM = 0.95


def orthogonalized(x):
    """
    Matrices whose singular values are all near 1 (0.7 to 1.2), by five Newton-Schulz steps: the
    update that changes every direction of a matrix by the same amount. x: (n, rows, columns);
    returns as many. Source: Jordan et al. 2024, "Muon".
    """
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.AdamW):
    """
    AdamW in which groups with muon=True step by Muon: by the momentum of their gradients,
    orthogonalized, times 0.2 sqrt(max(rows, columns)). This factor makes an update as large as one
    of AdamW, so one learning rate serves both (Liu et al. 2025, "Muon is scalable for LLM
    training"). Unlike torch.optim.Muon, this class computes in float32 and orthogonalizes matrices
    of one shape together, which takes a fraction of the time on a CPU.
    """

    def __init__(self, groups, **settings):
        super().__init__(groups, **settings)
        self._step_supports_amp_scaling = False  # a float16 run's scaler unscales gradients first

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group.get('muon'):
                self.muon_step(group)
        return super().step(closure)  # which skips what has no gradient any more

    def muon_step(self, group):
        by_shape = {}
        for p in group['params']:
            if p.grad is not None:
                by_shape.setdefault(p.shape, []).append(p)

        for shape, weights in by_shape.items():
            directions = []
            for p in weights:
                momentum = self.state[p].setdefault('momentum', torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - MOMENTUM)
                directions.append(p.grad.lerp(momentum, MOMENTUM))  # Nesterov's
                p.grad = None
            updates = orthogonalized(torch.stack(directions))

            rate = group['lr'] * 0.2 * math.sqrt(max(shape))
            for p, update in zip(weights, updates):
                p.mul_(1 - group['lr'] * group['weight_decay'])
                p.add_(update, alpha=-rate)
