"""
Hugging Face: read and write Llama-type checkpoints; read any other causal model through
transformers.

load_folder() returns a checkpoint in our format. save_folder() writes a folder that unmodified
transformers loads. Foreign wraps a model of transformers, so that it is called like ours. No code
of a checkpoint is run. A source is a local folder, hf:ORG/NAME or hf:ORG/NAME@REVISION. A source
with hf: is downloaded once into the hub's cache; after that it needs no network.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn

from lib.answers import note, optional, save_json, write_text
from lib.checksums import checksum_of_tensors, load_whole
from lib.devices import DTYPES
from lib.errors import UserError, fault_of
from lib.tokenizers import (
    EOT,
    byte_characters,
    from_hub,
    get_tokenizer,
    parse_ranks,
    start_token,
    tokenizer_from_state,
    tokenizer_state,
    word_splitter,
)
from model import VECTORS, ModelConfig, Transformer, small_vectors, vector_of
from position import parse_scaling, rope_frequencies

# Granite with attention in every layer and no experts is a Llama; without RoPE it is a NoPE Llama.
GRANITE = 'granitemoehybrid'
# {setting of a ModelConfig: its name in a config.json}.
NAMES = {'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
         'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
         'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size',
         'n_hidden': 'intermediate_size', 'norm_eps': 'rms_norm_eps',
         'tied': 'tie_word_embeddings'}
GRANITE_NAMES = NAMES | {'n_hidden': 'shared_intermediate_size'}
KINDS = {field.name: int | float if field.type is float else field.type
         for field in dataclasses.fields(ModelConfig)}
# Defaults of entries that a config.json may leave out, from the config's class in transformers.
LLAMA = {'max_position_embeddings': 2048, 'rope_theta': 10000.0, 'rms_norm_eps': 1e-6,
         'tie_word_embeddings': False}
DEFAULTS = {
    'llama': LLAMA,
    'smollm3': LLAMA | {'num_key_value_heads': 4, 'max_position_embeddings': 32768,
                        'rope_theta': 2000000.0, 'tie_word_embeddings': True},
    GRANITE: LLAMA | {'num_local_experts': 8, 'layer_types': 'mamba', 'attention_multiplier': 1.0}}
ROPE_TYPES = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn'}
# The metadata key of the checksum of all tensors, in a model.safetensors that we wrote.
CHECKSUM = 'nope_length_crc32'
# Entries about RoPE that we read, and entries that must have the value that our RoPE uses.
ROPE_READ = ('rope_type', 'type', 'rope_theta', 'factor', 'original_max_position_embeddings',
             'finetuned')
ROPE_FIXED = {'beta_fast': 32, 'beta_slow': 1, 'truncate': True, 'partial_rotary_factor': 1}


# ---------------------------------------------------------------------- files

def files_of(source, *patterns):
    """The folder of a source. From the hub, the files that match the patterns are downloaded."""
    if not source.startswith('hf:'):
        return Path(source)
    return from_hub(source, patterns, (
        'put its config.json, tokenizer.json, tokenizer_config.json and *.safetensors or '
        'pytorch_model*.bin into a folder and give that folder, --init_from=FOLDER.'))


def model_files(source):
    """
    The folder with all files that we read. The weights are safetensors, or .bin files if there are
    no safetensors.
    """
    folder = files_of(source, 'config.json', 'tokenizer.json', 'tokenizer_config.json',
                      'model*.safetensors*')  # the last * includes the index
    if any(folder.glob('model*.safetensors')):
        return folder
    return files_of(source, 'pytorch_model*.bin*')


def read_config(source):
    """The config.json of a source, with defaults for entries that it leaves out."""
    path = files_of(source, 'config.json') / 'config.json'
    if path.with_name('last.pt').is_file():
        raise UserError(f'{source} is a run of train.py. Name its checkpoint: '
                        f'--init_from={source}/last.pt.')
    if not path.is_file():
        raise UserError(f'{source} has no config.json. Give the folder of a Hugging Face model, or '
                        'last, best or a checkpoint file of ours.')
    with fault_of(path, 'the config.json of a model', 'Get it again.'):
        config = json.loads(path.read_text(encoding='utf-8'))
        return DEFAULTS.get(config.get('model_type'), {}) | config


def is_foreign(source):
    """True if a source is a Hugging Face model that only transformers can run."""
    is_source = source.startswith('hf:') or Path(source).is_dir()
    return is_source and read_config(source).get('model_type') not in DEFAULTS


def weight_files(folder):
    """The weight files of a folder: one file, or shards. The index is not read."""
    for pattern in ('model.safetensors', 'model-*.safetensors', 'pytorch_model.bin',
                    'pytorch_model-*.bin'):
        # Only regular files and links to them, which the hub's cache uses. A device file may be
        # endless.
        files = sorted(path for path in folder.glob(pattern) if path.is_file())
        if files:
            return files
    raise UserError(f'{folder} has neither model.safetensors nor pytorch_model.bin, nor shards of '
                    'one. Put the weights there.')


def read_safetensors(path):
    """{name: tensor} of a safetensors file."""
    package = optional('safetensors')
    open(path, 'rb').close()  # an OSError, such as for permissions, names the file
    try:
        with package.safe_open(path, 'pt') as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            written = (file.metadata() or {}).get(CHECKSUM)
        if written and written != checksum_of_tensors(tensors):
            raise ValueError('bytes differ from their checksum')
        return tensors
    except Exception as error:  # the package raises no narrower class
        raise UserError(f'{path} is damaged, cut short or not a file of weights '
                        f'({type(error).__name__}). Get it again.') from error


def read_weights(folder):
    """{name: tensor} of all weight files. They are mapped: only a tensor in use takes memory."""
    tensors = {}
    for path in weight_files(folder):
        if path.suffix == '.safetensors':
            part = read_safetensors(path)
        else:
            part = load_whole(path, 'Get it again.')
        count = len(tensors) + len(part)
        tensors |= part
        if len(tensors) < count:
            raise UserError(f'{path} has tensors that another file of weights has, too. Remove '
                            'the file that does not belong to this model.')
    return {name: tensor for name, tensor in tensors.items()
            if torch.is_tensor(tensor) and not name.endswith('rotary_emb.inv_freq')}


def load_tokenizer(folder, vocab_size):
    """
    The state of the folder's tokenizer, or None if there is no tokenizer.json. Refuses a tokenizer
    with more tokens than the model.
    """
    path = folder / 'tokenizer.json'
    if not path.is_file():
        return None
    encoding = get_tokenizer(str(path))
    if encoding.n_vocab > vocab_size:
        raise UserError(f'{path} has {encoding.n_vocab} tokens but the model only {vocab_size}. '
                        "Replace it with the model's own tokenizer.")
    return tokenizer_state(encoding)


# ---------------------------------------------------------------------- read

def our_config(config, source, position=None):
    """
    The ModelConfig of a config.json. position: None: as the config.json says. Refuses an entry that
    our model cannot reproduce exactly. An entry of the wrong kind may raise a TypeError.
    """
    kind, where = config.get('model_type'), f'config.json of {source}'
    if kind not in DEFAULTS:
        raise UserError(f"{source} has model_type '{kind}'. Only {', '.join(DEFAULTS)} can be "
                        'trained, tuned or exported. Other types can only be read as they are, by '
                        'eval_ppl.py and sample.py.')
    names = GRANITE_NAMES if kind == GRANITE else NAMES
    values = {ours: config.get(theirs) for ours, theirs in names.items()}
    if values['n_kv_head'] is None:
        values['n_kv_head'] = values['n_head']
    values['position'] = position or position_of(config, where)
    if 'rope' in values['position'].split(','):
        values |= rope_config(config, where)
    for name, kind in KINDS.items():
        if name in values and not isinstance(values[name], kind):
            raise TypeError(f'{names.get(name, name)} is {values[name]}')
    if not isinstance(config.get('attention_multiplier', 1.0), int | float):
        raise TypeError(f"attention_multiplier is {config['attention_multiplier']}")
    try:
        c = ModelConfig(**values)
    except ValueError as error:
        raise UserError(f'{where}: {error}') from error

    expected = {'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False,
                'partial_rotary_factor': 1, 'head_dim': c.head_dim, 'sliding_window': None,
                'num_local_experts': 0, 'embedding_multiplier': 1, 'residual_multiplier': 1,
                'logits_scaling': 1}
    if not same_in_all(config.get('layer_types'), ('attention', 'full_attention'), c.n_layer):
        expected['layer_types'] = 'attention in each layer'
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise UserError(f'{where} has {key} {config[key]}, but our model has {value}. Choose '
                            'another checkpoint.')
    return c


def same_in_all(layers, kinds, n_layer):
    """
    True if `layers` is a list with one of the kinds for each layer. Makes no list of n_layer
    entries, because a malformed config may have any n_layer.
    """
    return isinstance(layers, list) and len(layers) == n_layer and set(layers) <= set(kinds)


def position_of(config, where):
    """The position method of a config.json."""
    if config['model_type'] == 'llama':
        return 'rope'
    if config['model_type'] == GRANITE:
        return 'rope' if config.get('position_embedding_type') == 'rope' else 'none'
    layers = config.get('no_rope_layers')
    if not same_in_all(layers, (0, 1), config['num_hidden_layers']):
        raise UserError(f'{where} has no_rope_layers {layers}; it must be a list with 1 or 0 for '
                        'each layer. Get it again.')
    names = ['rope' if has_rope else 'none' for has_rope in layers]
    period = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ','.join(names[:period])


def rope_config(config, where):
    """
    rope_base, rope_scaling and rope_length of a config.json, as transformers 5 or an older version
    writes them.
    """
    # If both entries exist, transformers uses rope_scaling.
    rope = config.get('rope_scaling') or config.get('rope_parameters') or {}
    kind = rope.get('rope_type') or rope.get('type') or 'default'
    odd = {key: value for key, value in rope.items()
           if key not in ROPE_READ and value not in (None, ROPE_FIXED.get(key))}
    if kind not in ROPE_TYPES or odd:
        raise UserError(f"{where} has RoPE of type '{kind}' with {odd or rope}; our model has only "
                        f"{', '.join(ROPE_TYPES)}. Choose another checkpoint.")
    ours = {'rope_base': rope.get('rope_theta') or config['rope_theta']}
    if kind != 'default':
        ours['rope_scaling'] = f"{ROPE_TYPES[kind]}:{rope.get('factor')}"
    if kind == 'yarn':
        key = 'original_max_position_embeddings'
        ours['rope_length'] = config.get(key) or rope.get(key)
    return ours


def tensor_table(c, kind='llama'):
    """
    {our name: [(their name, shape), ...]}: our tensor is their tensors, concatenated along the
    rows. c: a ModelConfig; kind: their model_type.
    """
    C, kv = c.n_embd, c.head_dim * c.n_kv_head
    table = {'embed.weight': [('model.embed_tokens.weight', (c.vocab_size, C))]}
    block = {
        'attn_norm': [('input_layernorm', (C,))],
        'attn.qkv': [('self_attn.q_proj', (C, C)), ('self_attn.k_proj', (kv, C)),
                     ('self_attn.v_proj', (kv, C))],
        'attn.out': [('self_attn.o_proj', (C, C))],
        'mlp_norm': [('post_attention_layernorm', (C,))],
        'mlp.gate_up': [('mlp.gate_proj', (c.n_hidden, C)), ('mlp.up_proj', (c.n_hidden, C))],
        'mlp.out': [('mlp.down_proj', (C, c.n_hidden))]}
    if kind == GRANITE:
        block |= {'mlp.gate_up': [('shared_mlp.input_linear', (2 * c.n_hidden, C))],
                  'mlp.out': [('shared_mlp.output_linear', (C, c.n_hidden))]}
    for i in range(c.n_layer):
        for ours, parts in block.items():
            table[f'blocks.{i}.{ours}.weight'] = [
                (f'model.layers.{i}.{theirs}.weight', shape) for theirs, shape in parts]
    table['norm.weight'] = [('model.norm.weight', (C,))]
    if not c.tied:
        table['head.weight'] = [('lm_head.weight', (c.vocab_size, C))]
    return table


def our_state(tensors, c, config, source):
    """
    Our state dict from their tensors. Removes each tensor that it uses from `tensors`. Vectors
    become float32; matrices keep their type. config: their config.json.
    """
    def take(name, shape):
        weight = tensors.pop(name)
        if weight.shape != shape or weight.dtype not in DTYPES.values():
            raise UserError(f'{name} of {source} is {tuple(weight.shape)} {weight.dtype}, but '
                            f"config.json calls for {shape} in {', '.join(DTYPES)}. Do weights and "
                            'config.json belong together?')
        return weight.float() if weight.dim() == 1 else weight

    if c.n_layer > len(tensors):
        raise UserError(f'config.json of {source} calls for {c.n_layer} layers, but its weights '
                        f'are only {len(tensors)} tensors. Do weights and config.json belong '
                        'together?')
    table = tensor_table(c, config['model_type'])
    # Head scales, under the name that the paper's code uses. All layers have them, or none.
    scales = [f'model.layers.{i}.self_attn.scale_param' for i in range(c.n_layer)]
    if any(name in tensors for name in scales):
        for i, name in enumerate(scales):
            table[f'blocks.{i}.attn.head_scale'] = [(name, (c.n_head,))]
        note(f'{source} has head scales of its own, which are used')
    missing = [name for parts in table.values() for name, _ in parts if name not in tensors]
    if missing:
        raise UserError(f"{source} lacks {len(missing)} tensors: {', '.join(missing[:3])} ... Is "
                        'it a complete Llama?')

    state = {}
    for ours, parts in table.items():
        weights = [take(*part) for part in parts]
        state[ours] = torch.cat(weights) if len(weights) > 1 else weights[0]
        if ours.endswith('head_scale'):
            state[ours] = state[ours][:, None]
    # Granite's attention is softmax(multiplier * q.k), so the multiplier gives a uniform scale.
    root = c.head_dim ** 0.5
    scale = config.get('attention_multiplier', 1 / root) * root
    for i in range(c.n_layer):
        state.setdefault(f'blocks.{i}.attn.head_scale', torch.full((c.n_head, 1), scale))
        state[f'blocks.{i}.attn.head_gain'] = torch.ones(c.n_head, 1)
    if c.tied:
        state['head.weight'] = state['embed.weight']
        if not torch.equal(tensors.pop('lm_head.weight', state['head.weight']),
                           state['head.weight']):
            raise UserError(f'config.json of {source} ties the output to the embedding, but '
                            'lm_head.weight differs from the embedding. If the output was trained '
                            'separately, set tie_word_embeddings to false in config.json.')
    if tensors:
        raise UserError(f'{source} has {len(tensors)} tensors that our model has no place for: '
                        f"{', '.join(list(tensors)[:3])} ... Choose another checkpoint.")
    return state


def load_folder(source, position=None):
    """
    A checkpoint in our format, {model, model_config, tokenizer, step, settings}, from a source
    whose model_type is in DEFAULTS. position: the method that the model was trained with, such as
    'none' for a NoPE model whose config.json says Llama; None: as the config.json says.
    """
    config = read_config(source)
    try:
        c = our_config(config, source, position)
    except (TypeError, AttributeError) as error:  # for example, null instead of a list
        raise UserError(f'config.json of {source} has an entry of the wrong kind: {error}. Get it '
                        'again.') from error
    folder = model_files(source)
    tokenizer, tensors = load_tokenizer(folder, c.vocab_size), read_weights(folder)
    if position is None and config['model_type'] == 'llama':
        if any(name.endswith('.self_attn.scale_param') for name in tensors):
            raise UserError(f"{source} has head scales (scale_param), which the paper's code gives "
                            'to models without position encoding, but its config says Llama. '
                            'Add --position=none, or --position=rope if it was trained with RoPE.')
        note(f'{source}: its config says Llama, so it is read with RoPE. A checkpoint trained '
             'without position encoding says Llama, too: if its card says NoPE, add '
             '--position=none')
    return {'tokenizer': tokenizer, 'model': our_state(tensors, c, config, source),
            'model_config': dataclasses.asdict(c), 'step': 0, 'settings': {}}


# ---------------------------------------------------------------------- write

# The settings of a ModelConfig that a config.json can express. DAPE's other settings are here, too,
# because they have no effect without dape_kernel.
EXPORTED = {*NAMES, 'position', 'rope_base', 'rope_scaling', 'rope_length', 'dape_width',
            'dape_residual', 'dape_cheat'}


def require_exportable(model):
    """Refuse a model with a setting or a weight that a stock model of transformers cannot hold."""
    c = model.config
    odd = [f'position {c.position}']
    if set(c.position.split(',')) <= {'rope', 'none'}:
        odd = [f'{field.name} {getattr(c, field.name)}' for field in dataclasses.fields(c)
               if field.name not in EXPORTED and getattr(c, field.name) != field.default]
        known = {*tensor_table(c), 'head.weight'}
        odd += [name for name in model.state_dict()
                if name not in known and name not in small_vectors(model)]
        odd += [name for name, p in small_vectors(model).items()
                if name not in known and not VECTORS[vector_of(name)].fold
                and (p != VECTORS[vector_of(name)].neutral).any()]
    if odd:
        raise UserError(f"the model has {', '.join(odd[:3])}, which no model of transformers that "
                        'we know can hold, so the exported model would compute something else. '
                        'Export a model without it: position rope, none or a pattern of both.')


def their_config(c, dtype, length=0):
    """
    A config.json without the entries of tokens. RoPE becomes a Llama, NoPE becomes a Granite
    without RoPE, and a pattern of both becomes a SmolLM3. length: the number of tokens that the
    scales are for; used if it is more than L.
    """
    kind, factor = parse_scaling(c.rope_scaling)
    L, base, rope = c.trained_length, c.rope_base, None
    # NTK is only a larger base. The second frequency, base^(-2/D), gives this base.
    if kind == 'ntk':
        frequency, _ = rope_frequencies(c.head_dim, base, c.rope_scaling, L, L)
        base = frequency[1].item() ** (-c.head_dim / 2)
    elif kind:
        theirs = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
        rope = {'rope_type': theirs[kind], 'factor': factor}
        if kind == 'yarn':
            rope['original_max_position_embeddings'] = L
    # Dynamic NTK uses max_position_embeddings as L. For other types it is the longest context.
    longest = max(c.block_size, length, int(factor * L))
    if kind == 'dynamic_ntk':
        longest = L

    # Write RoPE in the older form, because every version of transformers reads it.
    names, own = NAMES, {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'],
                         'rope_theta': base, 'rope_scaling': rope}
    if ',' in c.position:
        flags = [int(c.method_of(layer) == 'rope') for layer in range(c.n_layer)]
        own |= {'model_type': 'smollm3', 'architectures': ['SmolLM3ForCausalLM'],
                'no_rope_layers': flags}
    if c.position == 'none':
        names, own = GRANITE_NAMES, {
            'model_type': GRANITE, 'architectures': ['GraniteMoeHybridForCausalLM'],
            'position_embedding_type': 'nope', 'layer_types': ['attention'] * c.n_layer,
            'num_local_experts': 0, 'attention_multiplier': c.head_dim ** -0.5,
            'mamba_n_heads': 1}  # no layer uses it, but it must divide twice the width
    return {theirs: getattr(c, ours) for ours, theirs in names.items()} | own | {
        'max_position_embeddings': longest, 'dtype': str(dtype).removeprefix('torch.')}


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
    for ours, parts in tensor_table(model.config, kind).items():
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


def tokenizer_json(state):
    """The text of a tokenizer.json that encodes like the tokenizer with this state."""
    if state['kind'] == 'hf':
        return state['text']
    package, characters = optional('tokenizers'), byte_characters()
    ranks = parse_ranks(state['text'], state['name'])

    def text(token):
        return ''.join(characters[byte] for byte in token)

    # tiktoken merges any two neighbors that together are a token, lowest rank first. So each way to
    # split a token into two tokens is a merge.
    merges = []
    for token in sorted(ranks, key=ranks.get):
        for i in range(1, len(token)):
            if token[:i] in ranks and token[i:] in ranks:
                merges.append((text(token[:i]), text(token[i:])))
    vocab = {text(token): rank for token, rank in ranks.items()}
    # If ids are left out, end-of-text would not get its id by being added at the end.
    if state['eot_token'] != len(vocab):
        vocab[EOT] = state['eot_token']
    tokenizer = package.Tokenizer(package.models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = word_splitter(state['pattern'])
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer.to_str()


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


# ---------------------------------------------------------------------- other models

class ForeignCache:
    """A cache of transformers, called like our KVCache."""

    def __init__(self, keys, max_length):
        self.keys, self.length, self.max_length = keys, 0, max_length

    def repeat(self, n):
        self.keys.batch_repeat_interleave(n)

    def reorder(self, source, start):
        self.keys.reorder_cache(source)


class Foreign(nn.Module):
    """A causal model of transformers, called like our Transformer. It has no scales to set."""

    scale_sets = None
    needs_equal_lengths = True  # read prompts of different lengths one by one
    forward, n_params = Transformer.forward, Transformer.n_params

    def __init__(self, model):
        super().__init__()
        self.model, c = model, model.config
        names = ('seq_length', 'max_seq_len', 'n_positions', 'max_position_embeddings')
        L = next((getattr(c, name) for name in names if getattr(c, name, None)), 2048)
        self.config = SimpleNamespace(
            vocab_size=c.vocab_size, block_size=L, trained_length=L, n_layer=c.num_hidden_layers,
            n_head=c.num_attention_heads, position=c.model_type, rope_scaling='')

    @property
    def head(self):
        return self.model.get_output_embeddings()

    def hidden(self, idx, cache=None, tail=0):
        """Like Transformer.hidden(), but computes all positions before it takes the tail."""
        c, store = self.model.config, cache or ForeignCache(None, None)
        end = store.length + idx.shape[1]
        if cache and end > store.max_length:
            raise UserError(f'the KV cache holds {store.max_length} tokens but {end} are needed. '
                            'Make it longer.')
        if end > getattr(c, 'n_positions', end):
            raise UserError(f'a {c.model_type} model has {c.n_positions} positions but {end} are '
                            'needed. Choose a shorter length.')
        if end > getattr(c, 'max_seq_len', end):
            # MPT makes its ALiBi biases for max_seq_len tokens. A larger max_seq_len does not
            # change the results of shorter inputs.
            c.max_seq_len = end
        store.length = end
        x = self.model.base_model(idx, past_key_values=store.keys, use_cache=bool(cache))[0]
        return x[:, -tail:]

    def new_cache(self, max_length):
        """A cache for up to max_length tokens."""
        keys = optional('transformers').DynamicCache(config=self.model.config)
        return ForeignCache(keys, max_length)

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
        sizes = {name: getattr(config, name, 0)
                 for name in ('num_hidden_layers', 'hidden_size', 'vocab_size')}
        # Check the sizes before memory for them is allocated.
        if sizes['num_hidden_layers'] > len(tensors) or max(sizes.values()) > held:
            raise ValueError(f'config.json calls for {sizes}, but its weights are {len(tensors)} '
                             f'tensors of {held:,} numbers in all.')
        model, report = package.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **local)
        if report['missing_keys']:  # transformers would use random weights for them
            raise ValueError(f"it lacks {', '.join(sorted(report['missing_keys'])[:3])} ...")
        model, idx = Foreign(model.eval()), torch.tensor([[0, 1]])
        # Some models change the logits after the output matrix. Foreign does not do this.
        with torch.no_grad():
            if not torch.allclose(model(idx), model.model(idx).logits, rtol=1e-3, atol=1e-4):
                raise ValueError(f'a {model.config.position} model changes its logits after the '
                                 'output matrix, which we do not support.')
    except Exception as error:  # the loaders of transformers share no class of errors
        why = str(error).partition('\n')[0]
        raise UserError(f'transformers cannot read {source}: {why} Choose another checkpoint, or '
                        'get its files again.') from error
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    return model, {'model_config': vars(model.config), 'tokenizer': tokenizer, 'step': 0,
                   'settings': {}}
