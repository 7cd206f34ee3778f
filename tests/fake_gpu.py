"""
A fake GPU. Inside fake_gpu(), tensors on `cuda` have a shape, a type and strides, but no numbers.
PyTorch's CUDA build says of each operation what it would return, or why it would fail.
"""

import contextlib
import types
from unittest import mock

import torch
import torch.cuda.amp.common
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import repeat_heads

# {kernel of scaled dot-product attention: compute capability that it is traced with}. Below 8 there
# is no FlashAttention, and keys are repeated for the other kernels.
KERNELS = {'flash': 9, 'cudnn': 9, 'efficient': 7, 'math': 7}


def forced(kernel):
    """
    scaled_dot_product_attention() by one of its kernels. If that kernel cannot do it, by the
    memory-efficient kernel. This function also does what PyTorch does before it calls a kernel.
    """
    aten = torch.ops.aten

    def attend(q, k, v, mask=None, is_causal=False, enable_gqa=False):
        assert mask is None or mask.dtype in (torch.bool, q.dtype)
        if kernel == 'math':
            return aten._scaled_dot_product_attention_math(q, k, v, mask, 0.0, is_causal,
                                                           enable_gqa=enable_gqa)[0]
        half = q.dtype != torch.float32
        if kernel == 'flash' and half and mask is None:
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
        if mask is not None:
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
            S = mask.shape[-1]
            mask = F.pad(mask, (0, -S % 16))[..., :S].expand(*q.shape[:3], S)
        attention = aten._scaled_dot_product_cudnn_attention
        learned = mask is not None and mask.requires_grad  # cuDNN has no gradient of a bias
        if kernel != 'cudnn' or not half or learned:
            attention = aten._scaled_dot_product_efficient_attention
            if enable_gqa:  # on `cuda` kernels.py has done it
                assert q.device.type == 'meta', 'no kernel without the whole matrix takes this'
                k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return attention(q, k, v, mask, torch.is_grad_enabled(), 0.0, is_causal)[0]
    return attend


@contextlib.contextmanager
def attention_by(kernel):
    """Attention uses this kernel, and PyTorch sees a GPU of the kernel's compute capability."""
    properties = types.SimpleNamespace(major=KERNELS[kernel])
    with (mock.patch.object(torch.cuda, 'get_device_properties', lambda device: properties),
          mock.patch.object(torch.cuda, 'is_bf16_supported', lambda **_: True),
          mock.patch.object(torch.cuda.amp.common, 'amp_definitely_not_available', lambda: False),
          mock.patch.object(F, 'scaled_dot_product_attention', forced(kernel))):
        yield


@contextlib.contextmanager
def fake_gpu(kernel):
    """As attention_by(), and tensors made inside are fake."""
    with attention_by(kernel), FakeTensorMode(allow_non_fake_inputs=True):
        yield
