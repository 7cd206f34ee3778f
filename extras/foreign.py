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
# With tables of L positions
TABLES = ('biogpt', 'codegen', 'ctrl', 'gpt2', 'gpt_bigcode', 'gpt_neo', 'gptj', 'openai-gpt',
          'opt')


class Foreign(nn.Module):
    """
    A model in a Hugging Face folder, with weights of this dtype, called like our Transformer.
    reason: why it is not one of ours. Raises ValueError if it is not causal, or if transformers
    would draw weights that the folder lacks, or leave out some of its layers.
    """

    def __init__(self, path, dtype, reason):
        super().__init__()
        from transformers import AutoModelForCausalLM
        self.model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **LOCAL)
        lost = [name for name in found['unexpected_keys']  # but for buffers of older versions
                if not name.endswith(('inv_freq', 'causal_mask', 'masked_bias', 'attn.bias',
                                      'attention.bias'))]
        for name in [*found['missing_keys'], *lost]:
            raise ValueError(f'only one of its files and its code in transformers has {name}')
        self.reason, c = reason, self.model.config.get_text_config()
        L = getattr(c, 'max_position_embeddings', getattr(c, 'max_seq_len', 2048))
        if c.model_type == 'mpt':  # it makes its biases for so many tokens
            c.max_seq_len = 2 ** 17
        self.config = SimpleNamespace(block_size=L, pretrained_length=L, position=c.model_type,
                                      rope_scaling='', short_conv=0, dape_kernel=0,
                                      json=self.model.config.to_json_string())  # for identity()
        arguments = inspect.signature(self.model.forward).parameters
        self.past = {'past_key_values', 'cache_params'} & arguments.keys()  # names of its cache
        # If it is causal, the texts 0 0 and 0 1 have the same logits at position 0.
        with torch.no_grad():
            first = [self(torch.tensor([[0, later]]))[:, 0] for later in (0, 1)]
        if not all(logits.isfinite().all() for logits in first):
            raise ValueError('its logits are not finite: try another --dtype=')
        if not torch.allclose(*first, rtol=1e-3, atol=1e-5):
            raise ValueError(f'{c.model_type} reads later tokens, so it is not causal')

    def forward(self, idx, targets=None, cache=None, tail=0):
        """
        Transformer.forward(), but the logits of all targets exist at the same time. Returns the
        losses of the last positions, (B, K), or without targets the logits of the last `tail`
        positions, (B, K, V); tail 0 means all.
        """
        self.require_room(idx.shape[1])
        n = tail if targets is None else targets.shape[1]
        state = {'use_cache': False}
        if cache is None:
            self.forget_length()
        else:
            state = {'use_cache': True} | dict.fromkeys(self.past, cache)
        logits = self.model(idx, logits_to_keep=n, **state).logits[:, -n:]      # (B, K, V)
        if targets is None:
            return logits
        return F.cross_entropy(logits.mT.float(), targets, reduction='none')

    def with_rope(self, *kinds):
        """The modules with a RoPE of these kinds that all layers share."""
        return [m for m in self.model.modules() if getattr(m, 'rope_type', None) in kinds]

    @property
    def depends_on_length(self):
        return bool(self.with_rope('dynamic', 'longrope'))

    def forget_length(self):
        """Undo dynamic NTK: transformers keeps that of a longer text."""
        for part in self.with_rope('dynamic'):
            part.max_seq_len_cached = part.original_max_seq_len
            part.inv_freq = part.original_inv_freq.to(part.inv_freq.device)

    def require_room(self, n_tokens):
        if self.config.position in TABLES and n_tokens > self.config.block_size:
            raise UserError(f'{self.config.position} reads at most {self.config.block_size} tokens,'
                            ' because it has a table of positions. Give shorter texts.')

    def new_cache(self, max_length):
        """
        A cache of transformers, called like our KVCache. It grows, whatever max_length is.
        """
        from transformers.cache_utils import DynamicCache
        if not self.past:
            raise UserError(f'{self.config.position} has no cache, so it cannot generate text.')
        self.require_room(max_length)
        self.forget_length()
        cache = DynamicCache(config=self.model.config)

        def repeat(n):
            try:
                cache.batch_repeat_interleave(n)
            except AttributeError:
                raise UserError(f'{self.config.position} has recurrent layers, which transformers '
                                'cannot read with several beams. Give --beams=1.') from None

        cache.repeat = repeat
        cache.reorder = lambda source, start: cache.reorder_cache(source)
        return cache

    def refuse(self, *_):
        raise UserError(f'transformers runs this {self.config.position} as it is, because '
                        f'{self.reason}. So it can only be evaluated and sampled from.')

    # Whoever touches one of these wants to change the model.
    blocks = head_scale = property(refuse)
