"""
Models of others, in and out. No code that comes with a model is run.

In: each stage takes a Hugging Face folder or hf:ORG/NAME[@REVISION] as --init_from. Models of the
types llama (TinyLlama, Llama 1 to 3, SmolLM2), smollm3 and granitemoehybrid become ours, if our
model can compute what they compute. All other causal models, such as BLOOM or Qwen3, are run by
transformers: they can be evaluated and sampled from, but not tuned, fine-tuned or written.
A NoPE model whose config.json says llama, such as hf:AntNLP/TinyLlama-NoPE-1.1B, is read with RoPE
unless you give --position=none.

Out: a new folder for transformers and vLLM, or for llama.cpp. NoPE becomes Granite without position
embedding, RoPE becomes Llama, and a pattern of both becomes SmolLM3. Head scales become part of the
rows of q, and head gains part of the columns of the output matrix, so they cost nothing.

$ python -m extras.convert --folder=out/demo/hf                       # as trained
$ python -m extras.convert --folder=out/demo/hf_640 --scale=out/demo/nope/scale_head_640.json \
    --target_length=640
$ python -m extras.convert --folder=out/demo/gguf --format=gguf       # pip install ".[gguf]"
"""

import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from configurator import UserError, configure

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import DTYPES, model_config, save_json, setup, weights_digest
from model import Transformer
from position import NoPE, RoPE, split_scaling
from stage import open_model
from tokenizer import EOT, PATTERN, get_tokenizer, parse_ranks, start_token, tokenizer_state

# which model
out_dir = 'out/demo/nope'    # folder of the run to read
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# what to write
folder = ''                  # the new folder
format = 'hf'                # hf: for transformers and vLLM; gguf: for llama.cpp
target_length: int | None = None  # tokens that it shall read; chooses among the sets of a scale file
dtype = 'bfloat16'           # of the written matrices: float32, bfloat16, float16

# {our setting: its name in a config.json}
NAMES = {'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
         'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
         'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size',
         'n_hidden': 'intermediate_size', 'norm_eps': 'rms_norm_eps',
         'tied': 'tie_word_embeddings'}
# {our weight of a layer: its parts in Llama, whose rows follow each other in ours}
PARTS = {
    'attn_norm': ['input_layernorm'],
    'attn.qkv': ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'],
    'attn.out': ['self_attn.o_proj'],
    'mlp_norm': ['post_attention_layernorm'],
    'mlp.gate_up': ['mlp.gate_proj', 'mlp.up_proj'],
    'mlp.out': ['mlp.down_proj'],
}
# What differs in Granite, which with attention in every layer and no experts is a Llama.
GRANITE = 'granitemoehybrid'
GRANITE_NAMES = NAMES | {'n_hidden': 'shared_intermediate_size'}
GRANITE_PARTS = PARTS | {'mlp.gate_up': ['shared_mlp.input_linear'],
                         'mlp.out': ['shared_mlp.output_linear']}
SCALES = 'model.layers.{}.self_attn.scale_param'  # head scales of a layer, in the paper's code
ROPE_TYPES = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn',
              'llama3': 'llama3'}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
# What our model computes where a config.json may ask for something else
FIXED = {'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False, 'num_local_experts': 0,
         'embedding_multiplier': 1, 'residual_multiplier': 1, 'logits_scaling': 1,
         'partial_rotary_factor': 1, 'beta_fast': 32, 'beta_slow': 1, 'truncate': True,
         'attention_factor': None, 'mscale': None, 'mscale_all_dim': None} | LLAMA3


# ---------------------------------------------------------------------- Llama and its kin

def tensor_names(c, parts):
    """{our weight: the names of its parts in a Hugging Face folder}. c: a ModelConfig."""
    names = {'embed.weight': ['model.embed_tokens.weight'], 'norm.weight': ['model.norm.weight']}
    for i in range(c.n_layer):
        for ours, theirs in parts.items():
            names[f'blocks.{i}.{ours}.weight'] = [f'model.layers.{i}.{one}.weight'
                                                  for one in theirs]
    return names if c.tied else names | {'head.weight': ['lm_head.weight']}


def trained_position(config):
    """The position method of a Llama, SmolLM3 or Granite."""
    if config.model_type == 'llama':
        return 'rope'
    if config.model_type == GRANITE:
        kind = getattr(config, 'position_embedding_type', None)
        if kind not in (None, 'none', 'nope', 'rope'):  # transformers would take it for NoPE
            raise UserError(f'position_embedding_type is {kind}, which no {GRANITE} has.')
        return 'rope' if kind == 'rope' else 'none'
    names = ['rope' if has_rope else 'none' for has_rope in config.no_rope_layers]
    period = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ','.join(names[:period])


def is_ours(config):
    """True if our model can compute what this config.json says."""
    if config.model_type not in ('llama', 'smollm3', GRANITE):
        return False
    trained_position(config)  # refuses some
    n_layer, head_dim = config.num_hidden_layers, config.hidden_size // config.num_attention_heads
    fixed = FIXED | {'head_dim': head_dim, 'layer_types': ['full_attention'] * n_layer}
    rope = config.rope_parameters or {}
    entries = config.to_dict() | rope
    return (rope.get('rope_type', 'default') in ROPE_TYPES
            and all(entries.get(name) in (None, value) for name, value in fixed.items()))


def read_tensors(folder):
    """{name: tensor} of all weight files of a folder, memory-mapped."""
    from safetensors.torch import load_file
    tensors = {}
    for path in sorted(folder.glob('model*.safetensors')):
        tensors |= load_file(path)
    for path in [] if tensors else sorted(folder.glob('pytorch_model*.bin')):
        tensors |= torch.load(path, 'cpu', weights_only=True, mmap=True)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith('inv_freq')}


def read_ours(path, config, position):
    """Our weights and the ModelConfig of a folder for which is_ours() is True."""
    tensors, is_granite = read_tensors(path), config.model_type == GRANITE
    if position is None:  # only NoPE models have head scales in the paper's code
        position = 'none' if SCALES.format(0) in tensors else trained_position(config)
    values = {ours: getattr(config, theirs)
              for ours, theirs in (GRANITE_NAMES if is_granite else NAMES).items()}
    # Our exports of models that read past L name L.
    values |= {'position': position, 'pretrained_length': getattr(config, 'pretrained_length', None)}
    if 'rope' in position:
        rope = config.rope_parameters
        values['rope_base'], kind = rope['rope_theta'], ROPE_TYPES[rope['rope_type']]
        values['rope_scaling'] = f"{kind}:{rope['factor']}" if kind else ''
        L = rope.get('original_max_position_embeddings')
        values['pretrained_length'] = L or values['pretrained_length']
    c = model_config(values)

    weights = {}
    for i in range(c.n_layer):
        scales = tensors.pop(SCALES.format(i), None)         # (H,)
        if scales is None and is_granite:  # its attention is softmax(multiplier q.k)
            scales = torch.full((c.n_head,), config.attention_multiplier * c.head_dim ** 0.5)
        if scales is not None:
            weights[f'blocks.{i}.attn.head_scale'] = scales[:, None]
    if c.tied:
        tensors.pop('lm_head.weight', None)
    names = tensor_names(c, GRANITE_PARTS if is_granite else PARTS)
    odd = tensors.keys() ^ sum(names.values(), [])
    if odd:
        raise ValueError(f'its weights are not those that its config.json calls for: {min(odd)}')
    for ours, theirs in names.items():
        weights[ours] = torch.cat([tensors.pop(name) for name in theirs])
    if c.tied:
        weights['head.weight'] = weights['embed.weight']
    return weights, c


# ---------------------------------------------------------------------- all other models

class ForeignCache:
    """A cache of transformers, called like our KVCache."""

    def __init__(self, config, device):
        from transformers import DynamicCache
        self.states, self.device, self.length = DynamicCache(config=config), device, 0

    def repeat(self, n):
        self.states.batch_repeat_interleave(n)

    def reorder(self, source, start):
        self.states.reorder_cache(source)


class Foreign(nn.Module):
    """A causal model that transformers runs, called like our Transformer."""

    def __init__(self, path, dtype):
        super().__init__()
        from transformers import AutoModelForCausalLM
        self.model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True, local_files_only=True)
        if report['missing_keys']:  # they would be random
            raise ValueError(f"its weights lack {min(report['missing_keys'])}")
        c = self.model.config.get_text_config()
        names = 'max_position_embeddings', 'max_seq_len', 'seq_length'
        L = next((getattr(c, name) for name in names if getattr(c, name, None)), 2048)
        self.config = SimpleNamespace(
            vocab_size=c.vocab_size, block_size=L, pretrained_length=L, position=c.model_type,
            rope_scaling='', short_conv=0, dape_kernel=0, random_positions=0)
        arguments = inspect.signature(self.model.forward).parameters
        self.past = 'cache_params' if 'cache_params' in arguments else 'past_key_values'
        self.eval()
        with torch.no_grad():
            first = [self(torch.tensor([[0, last]]))[:, 0] for last in (0, 1)]
        if not torch.allclose(*first, rtol=1e-3, atol=1e-5):
            raise ValueError('it reads later tokens, so it is not causal')

    def forward(self, idx, targets=None, cache=None, tail=0):
        """Transformer.forward(), but the logits of all targets exist at the same time."""
        n, state = tail if targets is None else targets.shape[1], {}
        total = idx.shape[1]
        if cache is not None:
            cache.length = total = total + cache.length
            state = {self.past: cache.states}
        if self.config.position == 'mpt':  # it makes its biases for so many tokens
            self.model.config.max_seq_len = max(total, self.config.block_size)
        logits = self.model(idx, logits_to_keep=n, use_cache=bool(state), **state).logits[:, -n:]
        if targets is None:
            return logits
        return torch.stack([F.cross_entropy(row.float(), ids, reduction='none')
                            for row, ids in zip(logits, targets)])

    def new_cache(self, max_length):
        """A cache. It grows as needed, whatever max_length is."""
        return ForeignCache(self.model.config, self.model.device)

    def refuse(self, *_):
        raise UserError(f'transformers runs this {self.config.position}: its heads have no scales '
                        'to set and no entropies to measure. Use a Llama.')

    blocks = head_scale = property(refuse)


# ---------------------------------------------------------------------- in

def folder_of(source):
    """The folder of a source. From the hub only what we read is downloaded, once."""
    if not source.startswith('hf:'):
        return Path(source)
    from huggingface_hub import snapshot_download
    repo, _, revision = source[3:].partition('@')
    download = partial(snapshot_download, repo, revision=revision or None)
    path = Path(download(allow_patterns=['*.json', 'model*.safetensors']))
    if not any(path.glob('model*.safetensors')):
        download(allow_patterns=['pytorch_model*.bin'])
    return path


def read(source, position=None, dtype=torch.float32):
    """
    A model of others, as read_checkpoint() returns one of ours. `model` is a state dict in our
    names, or a Foreign with weights of this dtype. position: the method that it was trained with,
    such as none for a NoPE model that says llama; None: as its config.json says.
    """
    kind, tokenizer = '', None
    try:
        from transformers import AutoConfig
        path = folder_of(source)
        (path / 'config.json').open().close()  # else transformers would look for it on the hub
        config = AutoConfig.from_pretrained(path)
        kind = f' (model_type {config.model_type})'
        if is_ours(config):
            weights, c = model, _ = read_ours(path, config, position)
        elif position:
            raise ValueError('transformers runs it, with its own position method')
        else:
            model = Foreign(path, dtype)
            weights, c = model.state_dict(), model.config
    except Exception as error:  # those of transformers, the hub and safetensors share no class
        raise UserError(f"{source}{kind} cannot be read: {str(error).partition(chr(10))[0]}. This "
                        'takes a folder, or hf:ORG/NAME, of Hugging Face, and pip install ".[hf]".'
                        ) from error
    if (path / 'tokenizer.json').is_file():
        tokenizer = tokenizer_state(get_tokenizer(str(path / 'tokenizer.json')))
    return {'model': model, 'model_config': c, 'digest': weights_digest(weights), 'step': 0,
            'settings': {}, 'tokenizer': tokenizer, 'path': source}


# ---------------------------------------------------------------------- out: weights and settings

def require_exportable(model):
    """Refuse a model that no stock model can hold, because the folder would compute otherwise."""
    c, rope_or_none = model.config, {RoPE, NoPE}
    methods = [block.attn.position for block in model.blocks]
    odd = [f'{one.name} {getattr(c, one.name)}' for one in dataclasses.fields(c)
           if one.name not in {*NAMES, 'position', 'pretrained_length', 'rope_base', 'rope_scaling'}
           and getattr(c, one.name) != one.default]
    if {type(method) for method in methods} - rope_or_none:
        odd.append(f'position {c.position}')
    if 'rope' in c.position and model.head_scale.dim() == 3:  # they act after RoPE's rotation
        odd.append('a scale per channel with RoPE')
    known = {'head.weight', *tensor_names(c, PARTS)}
    odd += [name for name in model.state_dict()
            if name not in known and not name.endswith(('head_scale', 'head_gain'))]
    if odd:
        raise UserError(f"the model has {', '.join(odd[:3])}, which no stock model of transformers "
                        'has. Only NoPE, RoPE and patterns of both can be written.')


def folded(attention):
    """qkv and out of a layer in float32, with its head scales in q and its gains in out."""
    scale, gain = (vector.expand(-1, attention.head_dim).flatten()           # (C,)
                   for vector in (attention.head_scale, attention.head_gain))
    qkv = attention.qkv.weight.float().clone()
    qkv[:len(scale)] *= scale[:, None]
    return {'qkv': qkv, 'out': attention.out.weight.float() * gain}


def their_weights(model, parts):
    """Yield (name, float32 tensor) of each tensor of a folder."""
    c = model.config
    rows_of = {3: [c.n_embd] + 2 * [c.n_kv_head * c.head_dim], 2: [c.n_hidden] * 2}
    weights = model.state_dict()
    for i, block in enumerate(model.blocks):
        for name, weight in folded(block.attn).items():
            weights[f'blocks.{i}.attn.{name}.weight'] = weight
    for ours, theirs in tensor_names(c, parts).items():
        weight = weights[ours].float()
        yield from zip(theirs, weight.split(rows_of.get(len(theirs), len(weight))))


def their_config(c, kind, encoding):
    """The config.json of a model. kind: its model_type."""
    scaling, factor = split_scaling(c.rope_scaling)
    longest = max(c.block_size, target_length or 0, int(factor * c.pretrained_length))
    config = {theirs: getattr(c, ours)
              for ours, theirs in (GRANITE_NAMES if kind == GRANITE else NAMES).items()}
    config |= {
        'model_type': kind, 'dtype': dtype, 'pretrained_length': c.pretrained_length,
        # dynamic NTK takes it for L
        'max_position_embeddings': c.pretrained_length if 'dyn' in scaling else longest,
        # No pad_token_id, because transformers never trains its row of the embedding.
        'bos_token_id': start_token(encoding), 'eos_token_id': encoding.eot_token}
    if kind == GRANITE:
        return config | {
            'architectures': ['GraniteMoeHybridForCausalLM'], 'position_embedding_type': 'nope',
            'layer_types': ['attention'] * c.n_layer, 'num_local_experts': 0,
            'attention_multiplier': c.head_dim ** -0.5,
            'mamba_n_heads': 1}  # no layer has it, but it must divide twice the width
    # The older form of these two entries, because newer versions of transformers read it, too.
    config |= {'rope_theta': c.rope_base, 'rope_scaling': None}
    if scaling == 'ntk':
        config['rope_theta'] *= factor ** (c.head_dim / (c.head_dim - 2))
    elif scaling:
        theirs = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
        rope = config['rope_scaling'] = {'rope_type': theirs[scaling], 'factor': factor}
        if scaling in ('yarn', 'llama3'):
            rope['original_max_position_embeddings'] = c.pretrained_length
        if scaling == 'llama3':
            rope |= LLAMA3
    if kind == 'llama':
        return config | {'architectures': ['LlamaForCausalLM']}
    has_rope = [int(c.method_of(layer) == 'rope') for layer in range(c.n_layer)]
    return config | {'architectures': ['SmolLM3ForCausalLM'], 'no_rope_layers': has_rope}


# ---------------------------------------------------------------------- out: tokenizer

def tokenizer_json(state):
    """The text of a tokenizer.json that encodes like the tokenizer with this state."""
    if state['kind'] == 'hf':
        return state['text']
    from transformers.convert_slow_tokenizer import TikTokenConverter
    # tiktoken merges any two neighbors that together are a token, lowest rank first. So each way to
    # split a token into two tokens is a merge.
    converter = TikTokenConverter(state['text'], state['pattern'], extra_special_tokens=[EOT])
    converter.load_tiktoken_bpe = parse_ranks  # of text, not of a file
    tokenizer = converter.converted()
    if tokenizer.token_to_id(EOT) != state['eot_token']:
        raise UserError(f"{state['name']} leaves out ids, which a tokenizer.json cannot.")
    return tokenizer.to_str()


def add_tokenizer(writer, state, encoding, vocab_size):
    """Put a byte-level BPE into a GGUF file."""
    from gguf import TokenType
    text = tokenizer_json(state)
    # llama.cpp knows patterns that cut text into words by name. Any pattern suits single bytes.
    splitter = {'gpt2': 'gpt-2', 'bytes': 'gpt-2'}.get(state['name'])
    if json.dumps(PATTERN) in text:
        splitter = 'llama-bpe'
    if not splitter:
        raise UserError(f"tokenizer {state['name']} cuts text into words by its own pattern. Write "
                        "--format=hf, and let llama.cpp's convert_hf_to_gguf.py read that folder.")
    model, end = json.loads(text)['model'], encoding.eot_token
    tokens = [f'[unused{i}]' for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in model['vocab'].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    tokens[end], types[end] = EOT, TokenType.CONTROL
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # llama.cpp requires at least one merge. A merge of two end tokens never applies to text.
    writer.add_token_merges([' '.join(pair) for pair in model['merges']] or [f'{EOT} {EOT}'])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


# ---------------------------------------------------------------------- out: formats

def write_hf(path, model, state):
    """A folder that AutoModelForCausalLM and AutoTokenizer of unmodified transformers load."""
    from safetensors.torch import save_file
    c, encoding = model.config, get_tokenizer(state)
    kind = {'none': GRANITE, 'rope': 'llama'}.get(c.position, 'smollm3')
    save_json(path / 'config.json', their_config(c, kind, encoding))
    start, end = (encoding.decode_bytes([i]).decode()
                  for i in (start_token(encoding), encoding.eot_token))
    save_json(path / 'tokenizer_config.json', {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': start, 'eos_token': end,
        'pad_token': end, 'padding_side': 'left'})
    (path / 'tokenizer.json').write_text(tokenizer_json(state), encoding='utf-8')
    weights = {name: weight.to(DTYPES[dtype] if weight.dim() == 2 else torch.float32, copy=True)
               for name, weight in their_weights(model, GRANITE_PARTS if kind == GRANITE else PARTS)}
    save_file(weights, path / 'model.safetensors', {'format': 'pt'})


def interleaved(weight, n_head):
    """
    The rows of q or k, (n_head * D, C), in llama.cpp's order. RoPE turns rows k and k + D/2 of a
    head together, and llama.cpp expects these two side by side.
    """
    return weight.view(n_head, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, model, state):
    """A folder with model.gguf for llama.cpp, which calls NoPE granite and RoPE llama."""
    import gguf
    c, encoding = model.config, get_tokenizer(state)
    scaling, factor = split_scaling(c.rope_scaling)
    if ',' in c.position or scaling in ('dynamic_ntk', 'llama3'):
        raise UserError(f'a GGUF file has RoPE in all layers or in none, and no {scaling}. Write '
                        '--format=hf.')
    config = their_config(c, 'llama', encoding)
    kind = 'granite' if c.position == 'none' else 'llama'
    writer = gguf.GGUFWriter(path / 'model.gguf', kind)
    writer.add_context_length(config['max_position_embeddings'])
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_hidden)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_kv_head)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    if kind == 'granite':
        writer.add_rope_scaling_finetuned(False)  # by this llama.cpp knows that it has no RoPE
        writer.add_attention_scale(c.head_dim ** -0.5)
        writer.add_logit_scale(1.0)
        writer.add_residual_scale(1.0)
        writer.add_embedding_scale(1.0)
    else:
        writer.add_rope_freq_base(config['rope_theta'])
    if config['rope_scaling']:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config['rope_scaling']['rope_type']))
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(c.pretrained_length)
    add_tokenizer(writer, state, encoding, c.vocab_size)

    kinds = gguf.GGMLQuantizationType
    matrix = kinds[dtype.replace('float', 'F').upper()]  # F32, F16, BF16
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.n_layer)
    for name, weight in their_weights(model, PARTS):
        if kind == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            weight = interleaved(weight, c.n_head if 'q_proj' in name else c.n_kv_head)
        type_ = matrix if weight.dim() == 2 else kinds.F32
        writer.add_tensor(names.get_name(name, try_suffixes=('.weight',)),
                          gguf.quants.quantize(weight.numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CARD = '''---
pipeline_tag: text-generation
---
# {name}

A causal transformer with {n_params:,} parameters: {n_layer} layers, {n_head} heads, width {n_embd},
{vocab_size} tokens. Its position method is `{position}`; `none` means no position encoding.
It was trained for {step} steps on windows of {pretrained_length} tokens ({dataset}).

Its softmax scales, from {low:.3f} to {high:.3f}, are part of the weights of q; 1 is as trained.
They come from {scale}, for texts of {target_length} tokens.

```python
{run}```
'''
RUN = {'hf': '''from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (one.from_pretrained('.') for one in (AutoModelForCausalLM, AutoTokenizer))
print(tokenizer.decode(model.generate(**tokenizer('def ', return_tensors='pt'))[0]))
''', 'gguf': '''from llama_cpp import Llama  # pip install llama-cpp-python
print(Llama('model.gguf', n_ctx=0)('def ', max_tokens=50)['choices'][0]['text'])
'''}


def main(given):
    write = {'hf': write_hf, 'gguf': write_gguf}.get(format)
    if not write or dtype not in DTYPES or not folder or Path(folder).exists():
        raise UserError(f"Give a new --folder= (it is '{folder}'), --format=hf or gguf, and "
                        f"--dtype={', '.join(DTYPES)}.")
    runtime = setup('cpu', 'float32')
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    if not isinstance(model, Transformer):
        model.refuse()
    require_exportable(model)
    if model.scale_sets:
        if target_length is None:
            raise UserError(f'{scale} has sets for {[*model.scale_sets]} tokens. Choose by '
                            '--target_length= one of these lengths, or one in between.')
        model.take_set(target_length)
    path, c = Path(folder), model.config
    path.mkdir(parents=True)
    write(path, model, info['tokenizer'])
    low, high = model.head_scale.aminmax()
    (path / 'README.md').write_text(CARD.format(
        **dataclasses.asdict(c) | {'position': f'{c.position} {c.rope_scaling}'.strip()},
        name=path.name, n_params=model.n_params(), step=info['step'], low=low, high=high,
        dataset=info['settings'].get('dataset', 'text not known'), run=RUN[format],
        scale=scale or 'the checkpoint', target_length=target_length or c.block_size))
    print(f"{info['path']} is now {folder}, in {dtype}. {folder}/README.md says how to run it.")


if __name__ == '__main__':
    main(configure(globals()))
