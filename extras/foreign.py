"""
Causal models that are not ours, such as BLOOM or Qwen3: transformers runs them, and our stages call
them like our own. They can be evaluated and sampled from, but not tuned, trained or written.
"""

import inspect
from types import SimpleNamespace

from configurator import UserError

import torch
import torch.nn as nn
import torch.nn.functional as F

# transformers neither asks the hub nor runs code that comes with a model.
LOCAL = {'local_files_only': True, 'trust_remote_code': False}


class Foreign(nn.Module):
    """
    A model in a Hugging Face folder, with weights of this dtype, called like our Transformer.
    reason: why it is not one of ours. Raises ValueError if it is not causal, if transformers would
    draw weights that the folder lacks, or if it would read a text as if it were longer.
    """

    def __init__(self, path, dtype, reason):
        super().__init__()
        from transformers import AutoModelForCausalLM
        self.model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **LOCAL)
        if found['missing_keys']:
            raise ValueError(f"the folder lacks {min(found['missing_keys'])}, which transformers "
                             'would draw at random')
        self.reason, c = reason, self.model.config.get_text_config()
        L = getattr(c, 'max_position_embeddings', getattr(c, 'max_seq_len', 2048))
        if c.model_type == 'mpt':  # it makes its biases for so many tokens
            c.max_seq_len = 2 ** 17
        self.config = SimpleNamespace(block_size=L, pretrained_length=L, position=c.model_type,
                                      rope_scaling='', short_conv=0, dape_kernel=0,
                                      json=self.model.config.to_json_string())  # for identity()
        kinds = [getattr(module, 'rope_type', None) for module in self.model.modules()]
        if 'dynamic' in kinds:
            raise ValueError('with dynamic NTK transformers reads a text with the frequencies of '
                             'the longest text before it')
        self.depends_on_length = 'longrope' in kinds  # two tables: for short and for long texts
        arguments = inspect.signature(self.model.forward).parameters
        self.past = {'past_key_values', 'cache_params'} & arguments.keys()  # names of its cache
        # If it is causal, the texts 0 0 and 0 1 have the same logits at position 0.
        with torch.no_grad():
            first = [self(torch.tensor([[0, later]]))[:, 0] for later in (0, 1)]
        if not torch.allclose(*first, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ValueError(f'{c.model_type} reads later tokens, so it is not causal')

    def forward(self, idx, targets=None, cache=None, tail=0):
        """
        Transformer.forward(), but the logits of all targets exist at the same time. Returns the
        losses of the last positions, (B, K), or without targets the logits of the last `tail`
        positions, (B, K, V); tail 0 means all.
        """
        n = tail if targets is None else targets.shape[1]
        past = {} if cache is None else dict.fromkeys(self.past, cache)
        logits = self.model(idx, logits_to_keep=n, use_cache=cache is not None, **past).logits
        logits = logits[:, -n:]  # (B, K, V); some models ignore logits_to_keep. [-0:] is all.
        if targets is None:
            return logits
        return F.cross_entropy(logits.mT.float(), targets, reduction='none')

    def new_cache(self, max_length):
        """
        A cache of transformers, called like our KVCache. It grows, whatever max_length is.
        """
        from transformers.cache_utils import DynamicCache
        if not self.past:
            raise UserError(f'{self.config.position} has no cache, so it cannot generate text.')
        cache = DynamicCache(config=self.model.config)
        cache.repeat = cache.batch_repeat_interleave
        cache.reorder = lambda source, n: cache.reorder_cache(source)
        return cache

    def refuse(self):
        raise UserError(f'transformers runs this {self.config.position} as it is, because '
                        f'{self.reason}. So it can only be evaluated and sampled from.')

    # Whoever touches one of these wants to change the model.
    blocks = head_scale = property(refuse)
