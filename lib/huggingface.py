"""
Read Llama-type checkpoints of Hugging Face.

load_folder() returns a checkpoint in our format. No code of a checkpoint is run. A source is a
local folder, hf:ORG/NAME or hf:ORG/NAME@REVISION. A source with hf: is downloaded once into the
hub's cache; after that it needs no network. lib/exports.py writes such folders. lib/foreign.py
reads all other models.
"""

import dataclasses
import json
from pathlib import Path

import torch

from lib.answers import note, optional
from lib.checksums import checksum_of_tensors, load_whole
from lib.devices import DTYPES
from lib.errors import UserError, fault_of
from lib.tokenizers import from_hub, get_tokenizer, tokenizer_state
from model import ModelConfig

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
# Entries that must have the value that our model uses, if a config.json has them.
FIXED = {'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False,
         'partial_rotary_factor': 1, 'sliding_window': None, 'num_local_experts': 0,
         'embedding_multiplier': 1, 'residual_multiplier': 1, 'logits_scaling': 1}
ROPE_TYPES = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn'}
# Entries about RoPE that we read, and entries that must have the value that our RoPE uses.
ROPE_READ = ('rope_type', 'type', 'rope_theta', 'factor', 'original_max_position_embeddings',
             'finetuned')
ROPE_FIXED = {'beta_fast': 32, 'beta_slow': 1, 'truncate': True, 'partial_rotary_factor': 1}
SCALES = 'model.layers.{}.self_attn.scale_param'  # head scales of a layer, in the paper's code
# The metadata key of the checksum of all tensors, in a model.safetensors that we wrote.
CHECKSUM = 'nope_length_crc32'


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
        if not tensors.keys().isdisjoint(part):
            raise UserError(f'{path} has tensors that another file of weights has, too. Remove '
                            'the file that does not belong to this model.')
        tensors |= part
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


# ---------------------------------------------------------------------- Llama-type models

def our_config(config, position=None):
    """
    The ModelConfig of a config.json. position: None: as the config.json says. Raises an error of
    MALFORMED if an entry has the wrong type, or a value that our model cannot reproduce exactly.
    """
    names = GRANITE_NAMES if config['model_type'] == GRANITE else NAMES
    values = {ours: config.get(theirs) for ours, theirs in names.items()}
    if values['n_kv_head'] is None:
        values['n_kv_head'] = values['n_head']
    values['position'] = position or position_of(config)
    if 'rope' in values['position'].split(','):
        values |= rope_config(config)
    values.setdefault('pretrained_length', config.get('pretrained_length'))  # of an export of ours
    for name, kind in KINDS.items():
        if name in values and not isinstance(values[name], kind):
            raise TypeError(f'{names.get(name, name)} is {values[name]}')
    if not isinstance(config.get('attention_multiplier', 1.0), int | float):
        raise TypeError(f"attention_multiplier is {config['attention_multiplier']}")
    c = ModelConfig(**values)

    fixed = FIXED | {'head_dim': c.head_dim}
    if not same_in_all(config.get('layer_types'), ('attention', 'full_attention'), c.n_layer):
        fixed['layer_types'] = 'attention in each layer'
    for key, value in fixed.items():
        if config.get(key) not in (None, value):
            raise ValueError(f'{key} is {config[key]}, but our model has {value}')
    return c


def same_in_all(layers, kinds, n_layer):
    """
    True if `layers` is a list with one of the kinds for each layer. Makes no list of n_layer
    entries, because a malformed config may have any n_layer.
    """
    return isinstance(layers, list) and len(layers) == n_layer and set(layers) <= set(kinds)


def position_of(config):
    """The position method of a config.json."""
    if config['model_type'] == 'llama':
        return 'rope'
    if config['model_type'] == GRANITE:
        return 'rope' if config.get('position_embedding_type') == 'rope' else 'none'
    layers = config.get('no_rope_layers')
    if not same_in_all(layers, (0, 1), config['num_hidden_layers']):
        raise ValueError(f'no_rope_layers is {layers}; it must have 1 or 0 for each layer')
    names = ['rope' if has_rope else 'none' for has_rope in layers]
    period = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ','.join(names[:period])


def rope_config(config):
    """
    rope_base, rope_scaling and pretrained_length of a config.json, as transformers 5 or an older
    version writes them.
    """
    # If both entries exist, transformers uses rope_scaling.
    rope = config.get('rope_scaling') or config.get('rope_parameters') or {}
    kind = rope.get('rope_type') or rope.get('type') or 'default'
    odd = {key: value for key, value in rope.items()
           if key not in ROPE_READ and value not in (None, ROPE_FIXED.get(key))}
    if kind not in ROPE_TYPES or odd:
        raise ValueError(f"RoPE is of type '{kind}' with {odd or rope}, but our model has only "
                         f"{', '.join(ROPE_TYPES)}")
    ours = {'rope_base': rope.get('rope_theta') or config['rope_theta']}
    if kind != 'default':
        ours['rope_scaling'] = f"{ROPE_TYPES[kind]}:{rope.get('factor')}"
    if kind == 'yarn':
        key = 'original_max_position_embeddings'
        ours['pretrained_length'] = config.get(key) or rope.get(key)
    return ours


def tensor_table(c, kind='llama', has_scales=False):
    """
    Yields (our name, [(their name, shape), ...]) for each of our tensors. Our tensor is their
    tensors, concatenated along the rows. c: a ModelConfig; kind: their model_type; has_scales: True
    if each layer has head scales, under the name that the paper's code uses.
    """
    C, kv = c.n_embd, c.head_dim * c.n_kv_head
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

    yield 'embed.weight', [('model.embed_tokens.weight', (c.vocab_size, C))]
    for i in range(c.n_layer):
        for ours, parts in block.items():
            yield f'blocks.{i}.{ours}.weight', [(f'model.layers.{i}.{theirs}.weight', shape)
                                                for theirs, shape in parts]
        if has_scales:
            yield f'blocks.{i}.attn.head_scale', [(SCALES.format(i), (c.n_head,))]
    yield 'norm.weight', [('model.norm.weight', (C,))]
    if not c.tied:
        yield 'head.weight', [('lm_head.weight', (c.vocab_size, C))]


def our_state(tensors, c, config, source):
    """
    Our weights, {name: tensor}, from their tensors. Removes each tensor that it uses from
    `tensors`. Vectors become float32; matrices keep their type. config: their config.json. Scales
    that are 1 are left out, because lib/checkpoints.py adds them.
    """
    def take(name, shape):
        weight = tensors.pop(name, None)
        if weight is None or weight.shape != shape or weight.dtype not in DTYPES.values():
            found = 'missing' if weight is None else f'{tuple(weight.shape)} {weight.dtype}'
            raise UserError(f'{name} of {source} is {found}, but config.json calls for {shape} in '
                            f"{', '.join(DTYPES)}. Get both again, from the same Llama.")
        return weight.float() if weight.dim() == 1 else weight

    state, has_scales = {}, SCALES.format(0) in tensors
    # The table is as long as config.json says, so stop at the first tensor that is missing.
    for ours, parts in tensor_table(c, config['model_type'], has_scales):
        weights = [take(*part) for part in parts]
        state[ours] = torch.cat(weights) if len(weights) > 1 else weights[0]
        if ours.endswith('head_scale'):  # (H,) there
            state[ours] = state[ours][:, None]
    # Granite's attention is softmax(multiplier * q.k), so the multiplier gives a uniform scale.
    if 'attention_multiplier' in config and not has_scales:
        scale = config['attention_multiplier'] * c.head_dim ** 0.5
        for i in range(c.n_layer):
            state[f'blocks.{i}.attn.head_scale'] = torch.full((c.n_head, 1), scale)
    if c.tied:
        head = state['head.weight'] = state['embed.weight']
        if not torch.equal(tensors.pop('lm_head.weight', head), head):
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
    kind = config.get('model_type')
    if kind not in DEFAULTS:
        raise UserError(f"{source} has model_type '{kind}'. Only {', '.join(DEFAULTS)} can be "
                        'trained, tuned or exported. Other types can only be read as they are, by '
                        'eval_ppl.py and sample.py.')
    with fault_of(f'config.json of {source}', 'that of a model like ours',
                  'Choose another checkpoint, or another --position.'):
        c = our_config(config, position)
    folder = model_files(source)
    tokenizer, tensors = load_tokenizer(folder, c.vocab_size), read_weights(folder)
    has_scales = SCALES.format(0) in tensors
    if position is None and kind == 'llama':
        if has_scales:
            raise UserError(f"{source} has head scales (scale_param), which the paper's code gives "
                            'to models without position encoding, but its config says Llama. '
                            'Add --position=none, or --position=rope if it was trained with RoPE.')
        note(f'{source}: its config says Llama, so it is read with RoPE. A checkpoint trained '
             'without position encoding says Llama, too: if its card says NoPE, add '
             '--position=none')
    if has_scales:
        note(f'{source} has head scales, which are used')
    return {'tokenizer': tokenizer, 'model': our_state(tensors, c, config, source),
            'model_config': dataclasses.asdict(c), 'step': 0, 'settings': {}}
