"""
Position methods: what a transformer adds to NoPE so that attention knows where a token stands.

NoPE ('none') adds nothing: the causal mask alone tells positions apart. A rotation turns q and k by an angle
that grows with the position, so that q_i . k_j depends on i - j. This file is plain PyTorch and imports nothing
of the project, so that it can be lifted out and read alone.
"""

import torch


def rope_angles(start, length, head_dim, base=10000.0, device=None):
    """
    Angles of rotary position encoding for positions start ... start + length - 1.
    Returns cos, sin: (length, head_dim // 2) float32. Pair k turns by position * base^(-2k / head_dim) radians.
    Source: Su et al. 2021 (RoFormer), Eq. (15).
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(start, start + length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """
    Turn each pair (x[k], x[k + D/2]) of a head by its angle: the half-split layout of Llama checkpoints.
    x: (B, H, T, D); cos, sin: (T, D/2). Returns (B, H, T, D) in x's dtype, computed in float32.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def no_rotation(start, length, config, device):
    return None


def rope(start, length, config, device):
    return rope_angles(start, length, config.n_embd // config.n_head, config.rope_base, device)


# name -> f(start, length, config, device), the angles for a pass over positions start ... start + length - 1
POSITIONS = {'none': no_rotation, 'rope': rope}
