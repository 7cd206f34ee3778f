"""
Write a model for other engines: a folder for transformers and vLLM, a GGUF file for llama.cpp.

save_folder() writes a folder that unmodified transformers loads. save_gguf() writes one file. The
small vectors of the model, such as its softmax scales, are folded into its matrices.
"""

import contextlib
import dataclasses

import torch

from lib.answers import optional, save_json, write_text
from lib.checksums import checksum_of_tensors
from lib.errors import UserError
from lib.huggingface import CHECKSUM, GRANITE, GRANITE_NAMES, NAMES, ROPE_TYPES, tensor_table
from lib.tokenizers import (
    EOT,
    PATTERN,
    byte_characters,
    parse_ranks,
    start_token,
    tokenizer_from_state,
    word_splitter,
)
from model import VECTORS, small_vectors, vector_of
from position import parse_scaling, rope_frequencies

# The settings of a ModelConfig that a config.json can express.
EXPORTED = {*NAMES, 'position', 'rope_base', 'rope_scaling', 'pretrained_length'}
# What llama.cpp calls the pattern that cuts text into words. Any pattern suits bytes.
SPLITTERS = {'gpt2': 'gpt-2', 'bytes': 'gpt-2'}


# ---------------------------------------------------------------------- config and weights

def require_exportable(model):
    """Refuse a model with a setting or a weight that a stock model of transformers cannot hold."""
    c = model.config
    odd = [f'position {c.position}']
    if set(c.position.split(',')) <= {'rope', 'none'}:
        odd = [f'{field.name} {getattr(c, field.name)}' for field in dataclasses.fields(c)
               if field.name not in EXPORTED and getattr(c, field.name) != field.default]
        known = {'head.weight', *dict(tensor_table(c))}
        for name, p in small_vectors(model).items():
            vector = VECTORS[vector_of(name)]
            if vector.fold or (p == vector.neutral).all():
                known.add(name)
        odd += [name for name in model.state_dict() if name not in known]
        # A scale per channel acts after RoPE's rotation. Folded into W_q it would act before.
        if 'rope' in c.position and any(block.attn.head_scale.shape[1] > 1
                                        for block in model.blocks):
            odd.append('a scale per channel with RoPE')
    if odd:
        raise UserError(f"the model has {', '.join(odd[:3])}, which no model of transformers that "
                        'we know can hold, so the exported model would compute something else. '
                        'Export a model without it: position rope, none or a pattern of both.')


def rope_entries(c):
    """
    The entries of a config.json about RoPE. They have the older form, because newer versions of
    transformers read it, too.
    """
    kind, factor = parse_scaling(c.rope_scaling)
    L, base, scaling = c.L0, c.rope_base, None
    # NTK is only a larger base. The second frequency, base^(-2/D), gives this base.
    if kind == 'ntk':
        frequency, _ = rope_frequencies(c.head_dim, base, c.rope_scaling, L, L)
        base = frequency[1].item() ** (-c.head_dim / 2)
    elif kind:
        theirs = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
        scaling = {'rope_type': theirs[kind], 'factor': factor}
        if kind == 'yarn':
            scaling['original_max_position_embeddings'] = L
    return {'rope_theta': base, 'rope_scaling': scaling}


def their_config(c, dtype, length=0):
    """
    A config.json without the entries of tokens. RoPE becomes a Llama, NoPE becomes a Granite
    without RoPE, and a pattern of both becomes a SmolLM3. length: the number of tokens that the
    scales are for; used if it is more than L.
    """
    kind, factor = parse_scaling(c.rope_scaling)
    names = GRANITE_NAMES if c.position == 'none' else NAMES
    config = {theirs: getattr(c, ours) for ours, theirs in names.items()}
    config['dtype'] = str(dtype).removeprefix('torch.')
    # Dynamic NTK uses max_position_embeddings as L. For other types it is the longest context.
    longest = max(c.block_size, length, int(factor * c.L0))
    config['max_position_embeddings'] = c.L0 if kind == 'dynamic_ntk' else longest
    if c.L0 < config['max_position_embeddings']:  # for our import: the cut context has L0 tokens
        config['pretrained_length'] = c.L0

    if c.position == 'none':
        return config | {
            'model_type': GRANITE, 'architectures': ['GraniteMoeHybridForCausalLM'],
            'position_embedding_type': 'nope', 'layer_types': ['attention'] * c.n_layer,
            'num_local_experts': 0, 'attention_multiplier': c.head_dim ** -0.5,
            'mamba_n_heads': 1}  # no layer uses it, but it must divide twice the width
    config |= rope_entries(c)
    if ',' in c.position:
        has_rope = [int(c.method_of(layer) == 'rope') for layer in range(c.n_layer)]
        return config | {'model_type': 'smollm3', 'architectures': ['SmolLM3ForCausalLM'],
                         'no_rope_layers': has_rope}
    return config | {'model_type': 'llama', 'architectures': ['LlamaForCausalLM']}


@torch.no_grad()
def folded_weight(model, name):
    """
    A weight in float32, multiplied by the small vectors of its layer that fold into it. Head scales
    fold into the rows of q, before RoPE's rotation. Head gains fold into the columns of the output
    matrix.
    """
    weight, known = model.get_parameter(name).float(), small_vectors(model)
    for vector in VECTORS.values():
        beside = name.removesuffix(vector.matrix) + vector.ending
        if vector.fold and name.endswith(vector.matrix) and beside in known:
            weight = vector.fold(weight, known[beside], model.config.head_dim)
    return weight


def their_state(model, dtype, kind):
    """
    Their tensors, {name: tensor}, from our model. Matrices are in `dtype`. Vectors are in float32,
    because they are small. kind: their model_type.
    """
    tensors = {}
    for ours, parts in tensor_table(model.config, kind):
        weight = folded_weight(model, ours)
        rows = weight.split([shape[0] for _, shape in parts])
        for (name, shape), part in zip(parts, rows):
            precision = dtype if len(shape) == 2 else torch.float32
            # Copy each tensor, because safetensors refuses tensors that share memory.
            tensors[name] = part.detach().to(precision, copy=True)
            if not tensors[name].isfinite().all():
                raise UserError(f'{name} with its scales is not finite in {precision}. Export '
                                'with a larger --dtype, such as float32, or smaller scales.')
    return tensors


# ---------------------------------------------------------------------- tokenizers

def byte_level_bpe(state):
    """({text of a token: its id}, [(left text, right text), ...] of merges) of a tiktoken state."""
    ranks, characters = parse_ranks(state['text'], state['name']), byte_characters()
    vocab = {''.join(characters[byte] for byte in token): rank for token, rank in ranks.items()}
    # tiktoken merges any two neighbors that together are a token, lowest rank first. So each way to
    # split a token into two tokens is a merge.
    return vocab, optional('transformers.convert_slow_tokenizer').generate_merges(vocab, None)


def tokenizer_json(state):
    """The text of a tokenizer.json that encodes like the tokenizer with this state."""
    if state['kind'] == 'hf':
        return state['text']
    package, (vocab, merges) = optional('tokenizers'), byte_level_bpe(state)
    # If ids are left out, end-of-text would not get its id by being added at the end.
    if state['eot_token'] != len(vocab):
        vocab[EOT] = state['eot_token']
    tokenizer = package.Tokenizer(package.models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = word_splitter(state['pattern'])
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer.to_str()


def add_tokenizer(writer, gguf, state, vocab_size):
    """
    Put a byte-level BPE into a GGUF file. Raises UserError if llama.cpp would split text into words
    by another pattern than the BPE.
    """
    splitter = SPLITTERS.get(state['name'])
    if state.get('pattern') == PATTERN:
        splitter = 'llama-bpe'
    if not splitter:
        raise UserError(f"tokenizer {state['name']} splits text into words by its own pattern. "
                        'llama.cpp may not have this pattern, and would then read other tokens. '
                        'Export with --ids_only=True, and encode the text outside llama.cpp.')
    vocab, merges = byte_level_bpe(state)
    end, kinds = state['eot_token'], gguf.TokenType
    texts = {i: text for text, i in vocab.items()} | {end: EOT}
    types = [kinds.NORMAL if i in texts else kinds.UNUSED for i in range(vocab_size)]
    types[end] = kinds.CONTROL
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list([texts.get(i, f'[unused{i}]') for i in range(vocab_size)])
    writer.add_token_types(types)
    # llama.cpp requires at least one merge. A merge of two end tokens never applies to text.
    writer.add_token_merges([' '.join(pair) for pair in merges] or [f'{EOT} {EOT}'])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


# ---------------------------------------------------------------------- formats

def save_folder(folder, model, tokenizer, dtype, length=0):
    """
    Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json, which
    AutoModelForCausalLM and AutoTokenizer of unmodified transformers load. tokenizer: its state;
    dtype: of the matrices; length: the number of tokens that the scales are for. If the model has
    scale sets, the caller must choose one first. model.safetensors holds a checksum, which
    read_safetensors() compares. Raises UserError for a model that transformers cannot reproduce.
    """
    safetensors = optional('safetensors.torch')
    require_exportable(model)
    encoding = tokenizer_from_state(tokenizer)
    config = their_config(model.config, dtype, length) | {'pad_token_id': None}
    tokens = {'tokenizer_class': 'PreTrainedTokenizerFast'}
    for name, i in ('bos_token', start_token(encoding)), ('eos_token', encoding.eot_token):
        config[f'{name}_id'], tokens[name] = i, encoding.decode_bytes([i]).decode()
    save_json(folder / 'config.json', config)
    save_json(folder / 'tokenizer_config.json', tokens)
    write_text(folder / 'tokenizer.json', tokenizer_json(tokenizer))
    tensors = their_state(model, dtype, config['model_type'])
    metadata = {'format': 'pt', CHECKSUM: checksum_of_tensors(tensors)}
    try:
        safetensors.save_file(tensors, folder / 'model.safetensors', metadata)
    except optional('safetensors').SafetensorError as error:
        raise OSError(error) from error


def interleaved(weight, n_head):
    """
    The rows of q or k, (n_head * D, C), in llama.cpp's order for RoPE. RoPE turns rows k and k +
    D/2 of a head together, and llama.cpp expects these two rows side by side.
    """
    halves = weight.view(n_head, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def add_settings(writer, gguf, c, config):
    """
    Put a model's sizes and constants into a GGUF file. c: its ModelConfig; config: from
    their_config(). llama.cpp runs granite without RoPE if rope.scaling.finetuned is false.
    """
    writer.add_context_length(config['max_position_embeddings'])
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_hidden)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_kv_head)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    if c.position == 'none':
        writer.add_rope_scaling_finetuned(False)
        writer.add_attention_scale(config['attention_multiplier'])
        writer.add_logit_scale(1.0)
        writer.add_residual_scale(1.0)
        writer.add_embedding_scale(1.0)
        return
    writer.add_rope_freq_base(config['rope_theta'])
    scaling = config['rope_scaling']
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling['rope_type']))
        writer.add_rope_scaling_factor(scaling['factor'])
        writer.add_rope_scaling_orig_ctx_len(c.L0)


def save_gguf(path, model, tokenizer, dtype, length=0):
    """
    Write a GGUF file, with RoPE as llama and NoPE as granite. tokenizer: its state, or None for a
    file of only ids; dtype: of the matrices; length: the number of tokens that the scales are for.
    """
    gguf, c = optional('gguf'), model.config
    require_exportable(model)
    if ',' in c.position or c.rope_scaling.startswith('dynamic_ntk'):
        raise UserError(f"position is '{c.position}' {c.rope_scaling}, but llama.cpp applies RoPE "
                        'in all layers or in none, and it has no dynamic NTK. Export with '
                        '--format=hf.')
    config = their_config(c, dtype, length)
    architecture, turned = 'llama', {'q_proj': c.n_head, 'k_proj': c.n_kv_head}
    if c.position == 'none':
        architecture, turned = 'granite', {}
    writer = gguf.GGUFWriter(path, architecture)
    add_settings(writer, gguf, c, config)
    if tokenizer:
        add_tokenizer(writer, gguf, tokenizer, c.vocab_size)
    else:
        writer.add_tokenizer_model('none')

    kinds = gguf.GGMLQuantizationType
    matrices = kinds[config['dtype'].replace('float', 'F').upper()]  # F32, F16, BF16
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.n_layer)
    for name, weight in their_state(model, dtype, 'llama').items():
        part = name.split('.')[-2]
        if part in turned:
            weight = interleaved(weight, turned[part])
        kind = matrices if weight.dim() == 2 else kinds.F32
        data = gguf.quants.quantize(weight.float().numpy(), kind)  # exact: already rounded
        writer.add_tensor(names.get_name(name, try_suffixes=('.weight',)), data, raw_dtype=kind)
    with contextlib.closing(writer):  # Windows cannot remove an open file
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
