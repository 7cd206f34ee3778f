"""
GGUF, the files of llama.cpp: one file holds settings, weights and tokenizer. We read and write a
Llama, and a Granite without scalings, which in llama.cpp may be a NoPE model. convert.py calls
this.
"""

import json
from pathlib import Path

from configurator import UserError

import torch

from common import model_config
from extras.hf_folder import our_weights, their_weights, tokenizer_json
from position import split_scaling, unused_settings
from tokenizer import (
    EOT,
    PATTERN,
    HFTokenizer,
    get_tokenizer,
    start_token,
    tokenizer_state,
)

# {our setting: its name in a file, after that of the architecture}
SETTINGS = {
    'vocab_size': 'vocab_size', 'block_size': 'context_length', 'n_layer': 'block_count',
    'n_head': 'attention.head_count', 'n_kv_head': 'attention.head_count_kv',
    'n_embd': 'embedding_length', 'n_hidden': 'feed_forward_length',
    'norm_eps': 'attention.layer_norm_rms_epsilon', 'rope_base': 'rope.freq_base'}
SCALINGS = {'none': '', 'linear': 'pi', 'yarn': 'yarn'}  # {its name: kind of our rope_scaling}
# {our weight: its names in a file}, as in hf_folder.py
WEIGHTS = {
    'embed': ['token_embd'], 'norm': ['output_norm'], 'head': ['output'],
    'blocks.*.attn_norm': ['blk.*.attn_norm'],
    'blocks.*.attn.qkv': ['blk.*.attn_q', 'blk.*.attn_k', 'blk.*.attn_v'],
    'blocks.*.attn.out': ['blk.*.attn_output'],
    'blocks.*.mlp_norm': ['blk.*.ffn_norm'],
    'blocks.*.mlp.gate_up': ['blk.*.ffn_gate', 'blk.*.ffn_up'],
    'blocks.*.mlp.out': ['blk.*.ffn_down']}
# RoPE rotates rows n and n + D/2 of a head together. llama.cpp stores the two side by side: with
# D = 4, our rows 0 1 2 3 are stored in the order 0 2 1 3.
ROTATED = 'attn_q.weight', 'attn_k.weight'
# Rules that cut text are spelled in many ways. Two that cut this text alike count as equal.
PROBE = "I'M sure it's  12345 x\n\n \t(3.14²)\r\n   中文，é's can’t👍!! e\u0301 हिन्दी\n"


def pre_tokenizers():
    """What cuts text into words before BPE: {its name in llama.cpp: a pre-tokenizer}."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    gpt2 = ByteLevel(add_prefix_space=False)
    return {'gpt-2': Sequence([gpt2]),
            'smollm': Sequence([Digits(individual_digits=True), gpt2]),
            'llama-bpe': Sequence([Split(Regex(PATTERN), 'isolated'),
                                   ByteLevel(add_prefix_space=False, use_regex=False)])}


def merges_of(tokenizer):
    """Its merges as pairs, however a file spells them."""
    return json.loads(tokenizer.to_str())['model']['merges']


def kind_of(tokenizer):
    """llama.cpp's name of the way in which a tokenizer cuts text, or None."""
    from tokenizers import models
    cut = tokenizer.pre_tokenizer                 # None for SentencePiece
    if not cut or tokenizer.normalizer or not isinstance(tokenizer.model, models.BPE):
        return None
    if not merges_of(tokenizer):
        return 'gpt-2'  # single bytes never merge, so for them any kind will do
    for name, known in pre_tokenizers().items():
        if known.pre_tokenize_str(PROBE) == cut.pre_tokenize_str(PROBE):
            return name
    return None


# ---------------------------------------------------------------------- in

def below(fields, prefix):
    """The fields whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in fields.items()
            if name.startswith(prefix)}


def config_of(fields, tied):
    """The ModelConfig of the fields of a file. Raises ValueError if ours cannot be such a model."""
    kind = fields['general.architecture']
    if kind not in ('llama', 'granite'):
        raise ValueError(f'its architecture is {kind}, not llama or granite')
    own = below(fields, f'{kind}.')
    # Each field that is read is popped. What is left over must be one of those that are known.
    values = {ours: own.pop(theirs) for ours, theirs in SETTINGS.items()}
    # llama.cpp switches a Granite's RoPE off if this field is False, in spite of its name.
    has_rope = kind == 'llama' or own.pop('rope.scaling.finetuned', True)
    values |= {'position': 'rope' if has_rope else 'none', 'tied': tied,
               'pretrained_length': own.pop('rope.scaling.original_context_length', None)}
    scaling = SCALINGS[own.pop('rope.scaling.type', 'none')]
    if scaling:
        values['rope_scaling'] = f"{scaling}:{own.pop('rope.scaling.factor'):.12g}"
    c = model_config(values | unused_settings(values))
    # fields that may be present if they say what our model does anyway
    known = {'rope.dimension_count': c.head_dim, 'attention.key_length': c.head_dim,
             'attention.value_length': c.head_dim, 'logit_scale': 1}
    for name, value in own.items():
        if value != known.get(name):
            raise ValueError(f'its {name} is {value}, which our model does not compute')
    return c


def read_tokenizer(name, fields):
    """The state of the tokenizer in the fields of a file."""
    from gguf import TokenType
    from tokenizers import Tokenizer, decoders, models, processors
    own, known = below(fields, 'tokenizer.ggml.'), pre_tokenizers()
    kind, tokens = own.get('pre', own['model']), own['tokens']
    if kind not in known:
        raise ValueError(f'its tokenizer is {kind}, not {" or ".join(known)}')
    vocab = {token: i for i, token in enumerate(tokens)}
    # A tokenizer of bytes has no merges, but its file must have one. It is of two end tokens, which
    # make no token together, so it is left out.
    merges = [tuple(pair.split(' ')) for pair in own['merges'] if pair.replace(' ', '') in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == 'llama-bpe'))
    tokenizer.pre_tokenizer, tokenizer.decoder = known[kind], decoders.ByteLevel()
    for token, its in zip(tokens, own['token_type']):
        if its == TokenType.CONTROL:
            tokenizer.add_special_tokens([token])
        elif its == TokenType.USER_DEFINED:
            tokenizer.add_tokens([token])
    if own.get('add_bos_token', kind == 'llama-bpe'):
        start = own['bos_token_id']
        tokenizer.post_processor = processors.TemplateProcessing(
            f'{tokens[start]} $A', special_tokens=[(tokens[start], start)])
    return tokenizer_state(HFTokenizer(name, tokenizer.to_str(), tokens[own['eos_token_id']]))


def read(path):
    """
    The ModelConfig of a file, our weights in float32, and the state of its tokenizer. Raises
    ValueError if our model does not compute what it asks.
    """
    import gguf
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    c = config_of(fields, 'output.weight' not in [tensor.name for tensor in reader.tensors])
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(ROTATED):
            weight = weight.view(-1, c.head_dim // 2, 2, c.n_embd)           # (H, D/2, 2, C)
            weight = weight.transpose(1, 2).flatten(0, 2)                    # (H D, C)
        weights[tensor.name] = weight
    return c, our_weights(c, weights, WEIGHTS), read_tokenizer(Path(path).name, fields)


# ---------------------------------------------------------------------- out

def write_tokenizer(writer, tokenizer, encoding, n):
    """
    Add the fields of a tokenizer. n: ids of the model. It may have unused ones, and the tokenizer
    more ids, which the model cannot read.
    """
    from gguf import TokenType
    tokens, types, added = [], [], tokenizer.get_added_tokens_decoder()
    for i in range(n):
        token, kind = tokenizer.id_to_token(i), TokenType.NORMAL
        if token is None:
            token, kind = f'[unused {i}]', TokenType.UNUSED
        elif i in added:
            kind = TokenType.CONTROL if added[i].special else TokenType.USER_DEFINED
        tokens.append(token)
        types.append(kind)
    writer.add_tokenizer_model('gpt2')  # byte-level BPE
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # At least one is needed. A merge of two end tokens never applies to text.
    writer.add_token_merges([' '.join(pair) for pair in merges_of(tokenizer)] or [f'{EOT} {EOT}'])
    writer.add_bos_token_id(start_token(encoding))
    writer.add_eos_token_id(encoding.eot_token)
    writer.add_add_bos_token(start_token(encoding) != encoding.eot_token)


def write(path, model, state, dtype):
    """Write a file. state: of the tokenizer; dtype: of the matrices."""
    import gguf
    from tokenizers import Tokenizer
    c, encoding = model.config, get_tokenizer(state)
    tokenizer = Tokenizer.from_str(tokenizer_json(state))
    kind, pre = {'none': 'granite', 'rope': 'llama'}.get(c.position), kind_of(tokenizer)
    scaling, factor = split_scaling(c.rope_scaling)
    if not kind or scaling not in SCALINGS.values() or not pre:
        raise UserError(f'llama.cpp has no name for position {c.position} {c.rope_scaling} with '
                        f'tokenizer {encoding.name}. Write --format=hf.')
    writer = gguf.GGUFWriter(path, kind)
    for ours, theirs in SETTINGS.items():
        add = writer.add_float32 if ours in ('norm_eps', 'rope_base') else writer.add_uint32
        add(f'{kind}.{theirs}', getattr(c, ours))
    writer.add_rope_scaling_orig_ctx_len(c.pretrained_length)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType('linear' if scaling == 'pi' else scaling))
        writer.add_rope_scaling_factor(factor)
    if kind == 'granite':
        writer.add_logit_scale(1.0)
        writer.add_rope_scaling_finetuned(False)  # for llama.cpp this means: without RoPE
    writer.add_tokenizer_pre(pre)
    write_tokenizer(writer, tokenizer, encoding, c.vocab_size)
    matrix = gguf.GGMLQuantizationType[dtype.replace('float', 'F').upper()]  # F32, F16, BF16
    for name, weight in their_weights(model, WEIGHTS).items():
        if name.endswith(ROTATED):
            weight = weight.view(-1, 2, c.head_dim // 2, c.n_embd)           # (H, 2, D/2, C)
            weight = weight.transpose(1, 2).flatten(0, 2)                    # (H D, C)
        its = matrix if weight.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), its), raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
