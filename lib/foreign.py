"""
Models that are not Llamas: transformers runs them, and Foreign makes them callable like ours.

They can be evaluated and sampled from. No code of a checkpoint is run.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn

from lib.answers import optional
from lib.errors import UserError
from lib.huggingface import load_tokenizer, model_files, read_weights
from model import Transformer


class ForeignCache:
    """A cache of transformers, called like our KVCache."""

    def __init__(self, config):
        self.keys = optional('transformers').DynamicCache(config=config)

    @property
    def length(self):
        return self.keys.get_seq_length()

    def repeat(self, n):
        try:
            self.keys.batch_repeat_interleave(n)
        except AttributeError as error:
            raise UserError('transformers cannot copy the state of a layer of this model, as beams '
                            'and multiple choice need. Choose a model whose layers are all '
                            'attention.') from error

    def reorder(self, source, start):
        self.keys.reorder_cache(source)


class Foreign(nn.Module):
    """A causal model of transformers, called like our Transformer. It has no scales to set."""

    scale_sets, replaced = None, {}
    needs_equal_lengths = True  # read prompts of different lengths one by one
    forward, n_params = Transformer.forward, Transformer.n_params

    def __init__(self, model):
        super().__init__()
        self.model, c = model, model.config
        names = ('seq_length', 'max_seq_len', 'n_positions', 'max_position_embeddings')
        L = next((getattr(c, name) for name in names if getattr(c, name, None)), 2048)
        self.config = SimpleNamespace(
            vocab_size=c.vocab_size, block_size=L, L0=L, n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads, position=c.model_type, rope_scaling='')
        # A second embedding holds a vector for each position.
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)
                  and module is not model.get_input_embeddings()]
        has_limit = tables or hasattr(c, 'n_positions')
        self.n_positions = L if has_limit else math.inf

    @property
    def head(self):
        return self.model.get_output_embeddings()

    def hidden(self, idx, cache=None, tail=0):
        """Like Transformer.hidden(), but computes all positions before it takes the tail."""
        c, T = self.model.config, idx.shape[1]
        end = T + cache.length if cache else T
        if end > self.n_positions:
            raise UserError(f'this {c.model_type} model has {self.n_positions} positions but {end} '
                            'are needed. Choose a shorter length.')
        if end > getattr(c, 'max_seq_len', end):
            # MPT makes its ALiBi biases for max_seq_len tokens. A larger max_seq_len does not
            # change the results of shorter inputs.
            c.max_seq_len = end
        keys = cache.keys if cache else None
        x = self.model.base_model(idx, past_key_values=keys, use_cache=bool(cache))[0]
        return x[:, -tail:]

    def new_cache(self, max_length):
        """A cache. It grows as needed, whatever max_length is."""
        return ForeignCache(self.model.config)

    def refuse(self, *_):
        raise UserError(f'a {self.config.position} model is read through transformers: no scale of '
                        'it can be tuned or applied, nor its entropy measured. Use a Llama-type '
                        'checkpoint for that.')

    head_scale = property(refuse, refuse)
    probe = refuse


def load_foreign(source, dtype=torch.float32):
    """A Foreign model, and a checkpoint's other entries (see load_folder). dtype: of weights."""
    package, folder = optional('transformers'), model_files(source)
    optional('transformers.utils.logging').disable_progress_bar()
    tensors = read_weights(folder)  # mapped; finds damage, which transformers does not
    held = sum(tensor.numel() for tensor in tensors.values())
    local = {'local_files_only': True, 'trust_remote_code': False}
    try:
        config = package.AutoConfig.from_pretrained(folder, **local)
        n_layer, widths = config.num_hidden_layers, (config.hidden_size, config.vocab_size)
        # Check the sizes before memory for them is allocated.
        if n_layer > len(tensors) or max(widths) > held:
            raise ValueError(f'config.json calls for {n_layer} layers of {widths}, but its weights '
                             f'are {len(tensors)} tensors of {held:,} numbers in all.')
        model, report = package.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **local)
        if report['missing_keys']:  # transformers would use random weights for them
            raise ValueError(f"it lacks {', '.join(sorted(report['missing_keys'])[:3])} ...")
        model, idx = Foreign(model.eval()), torch.tensor([[0, 1]])
        with torch.no_grad():
            logits, kind = model(idx), f'a {model.config.position} model'
            # Some models change the logits after the output matrix. Foreign does not do this.
            if not torch.allclose(logits, model.model(idx).logits, rtol=1e-3, atol=1e-4):
                raise ValueError(f'{kind} changes its logits after the output matrix, which we do '
                                 'not support.')
            if not torch.allclose(logits[:, 0], model(idx * 0)[:, 0], rtol=1e-3, atol=1e-5):
                raise ValueError(f'{kind} reads later tokens: it is not causal.')
    except Exception as error:  # the loaders of transformers share no class of errors
        why = str(error).partition('\n')[0]
        raise UserError(f'transformers cannot read {source}: {why} Choose another checkpoint, or '
                        'get its files again.') from error
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    return model, {'model_config': vars(model.config), 'tokenizer': tokenizer, 'step': 0,
                   'settings': {}}
