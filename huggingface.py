"""
Doors to Hugging Face: Llama-type checkpoints in and out, and any other causal model read through transformers.

load_folder() gives a checkpoint in our format, save_folder() writes a folder that stock transformers loads, and Foreign
puts a model of transformers behind the calls of ours. No code of a checkpoint is run. A source is a local folder, or
hf:ORG/NAME or hf:ORG/NAME@REVISION, downloaded once into the hub's cache and found there without a network.
"""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn

from corpus import (
    EOT,
    byte_characters,
    from_hub,
    get_tokenizer,
    parse_ranks,
    start_token,
    tokenizer_from_state,
    tokenizer_state,
)
from model import ModelConfig, Transformer
from position import parse_scaling, rope_frequencies
from runtime import DTYPES, optional, require_checksums, save_json, write_text

# what a config.json may leave out, as its class in transformers has it
DEFAULTS = {'llama': {'num_key_value_heads': None, 'max_position_embeddings': 2048, 'rope_theta': 10000.0,
                      'rms_norm_eps': 1e-6, 'tie_word_embeddings': False},
            'smollm3': {'num_key_value_heads': 4, 'max_position_embeddings': 32768, 'rope_theta': 2000000.0,
                        'rms_norm_eps': 1e-6, 'tie_word_embeddings': True, 'use_sliding_window': False}}
ROPE_TYPES = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn'}  # theirs: ours
ROPE_KEYS = ('rope_type', 'type', 'rope_theta', 'factor', 'original_max_position_embeddings', 'finetuned')
ROPE_CONSTANTS = {'beta_fast': 32, 'beta_slow': 1, 'truncate': True, 'partial_rotary_factor': 1}


# ----------------------------------------------------------------------------- in

def files_of(source, *patterns):
    """The folder of a source; from the hub it has the files that match the patterns. Raises ValueError if not there."""
    return Path(source) if not source.startswith('hf:') else from_hub(
        source, patterns, 'put its config.json, tokenizer.json, tokenizer_config.json and *.safetensors or '
        'pytorch_model*.bin into a folder and give that, --init_from=FOLDER.')


def model_files(source):
    """files_of() all we read: weights as safetensors, or where there are none as pytorch_model.bin."""
    folder = files_of(source, 'config.json', 'tokenizer.json', 'tokenizer_config.json', '*.safetensors',
                      '*.safetensors.index.json')
    return folder if any(folder.glob('*.safetensors')) else files_of(source, 'pytorch_model*.bin*')


def read_config(source):
    """config.json of a source, with what it leaves out."""
    path = files_of(source, 'config.json') / 'config.json'
    if path.with_name('last.pt').is_file():
        raise ValueError(f'{source} is a run of train.py. Name its checkpoint: --init_from={source}/last.pt.')
    if not path.is_file():
        raise ValueError(f'{source} has no config.json. Give the folder of a Hugging Face model, '
                         'or last, best or a checkpoint file of ours.')
    try:
        config = json.loads(path.read_text(encoding='utf-8'))
        return DEFAULTS.get(config.get('model_type'), {}) | config
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f'{path} is not the config.json of a model ({error}). Get it again.') from error


def is_ours(config):
    """True if load_folder() can make our Transformer of a model with this config.json."""
    return config.get('model_type') in DEFAULTS


def is_foreign(source):
    """True if a source is a Hugging Face model that only transformers can run."""
    return (source.startswith('hf:') or Path(source).is_dir()) and not is_ours(read_config(source))


def our_config(config, source, position=None):
    """
    The ModelConfig of a Llama or SmolLM3 config.json. position: None takes its word. Raises ValueError for whatever our
    model does not do, rather than read it as something near.
    """
    if not is_ours(config):
        raise ValueError(f"{source} has model_type '{config.get('model_type')}'; of {' and '.join(DEFAULTS)} alone we "
                         'make a model to train, tune or export. Others can only be read as they are, by eval_ppl.py '
                         'and sample.py.')
    try:
        sizes = dict(vocab_size=config['vocab_size'], n_layer=config['num_hidden_layers'], n_embd=config['hidden_size'],
                     n_head=config['num_attention_heads'], n_hidden=config['intermediate_size'],
                     block_size=config['max_position_embeddings'])
        rope_layers = None if config['model_type'] == 'llama' else config['no_rope_layers']
    except KeyError as error:
        raise ValueError(f'config.json of {source} lacks {error}. Get it again.') from None
    odd = [f'{name} {size}' for name, size in sizes.items() if type(size) is not int or size < 1]
    if odd:
        raise ValueError(f"config.json of {source} has {', '.join(odd)}; each must be a whole number. Get it again.")
    expected = {'hidden_act': 'silu', 'attention_bias': False, 'mlp_bias': False, 'partial_rotary_factor': 1,
                'head_dim': sizes['n_embd'] // sizes['n_head']}
    if not same_in_all(config.get('layer_types'), 'full_attention', sizes['n_layer']):
        expected['layer_types'] = 'full_attention for each layer'
    if config.get('use_sliding_window', True):
        expected['sliding_window'] = None
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise ValueError(f'config.json of {source} has {key} {config[key]}; our model has {value}. '
                             'Choose another checkpoint.')
    is_llama = config['model_type'] == 'llama'
    has_rope = is_llama or same_in_all(rope_layers, 1, sizes['n_layer'])
    if not has_rope and not same_in_all(rope_layers, 0, sizes['n_layer']):
        raise ValueError(f'config.json of {source} has no_rope_layers {rope_layers}; our model has RoPE in all of its '
                         f"{sizes['n_layer']} layers or in none. Choose another checkpoint.")
    position = position or ('rope' if has_rope else 'none')
    rope = rope_config(config, source) if position == 'rope' else {}
    try:
        return ModelConfig(**sizes, n_kv_head=config['num_key_value_heads'] or sizes['n_head'],
                           position=position, tied=config['tie_word_embeddings'],
                           norm_eps=config['rms_norm_eps'], **rope)
    except ValueError as error:
        raise ValueError(f'config.json of {source}: {error}') from error


def same_in_all(layers, kind, n_layer):
    """
    True if `layers` lists that kind for each layer. n_layer may be any number that a config.json
    says, so no list of that length is made to compare with.
    """
    if not isinstance(layers, list) or len(layers) != n_layer:
        return False
    return all(layer == kind for layer in layers)


def rope_config(config, source):
    """rope_base, rope_scaling and rope_length, from the way transformers 5 writes them or the older one."""
    rope = config.get('rope_scaling') or config.get('rope_parameters') or {}  # of both transformers takes the first
    kind = rope.get('rope_type') or rope.get('type') or 'default'
    odd = {key: x for key, x in rope.items() if key not in ROPE_KEYS and x not in (None, ROPE_CONSTANTS.get(key))}
    if kind not in ROPE_TYPES or kind != 'default' and (rope.get('factor') or 0) < 1 or odd:
        raise ValueError(f"config.json of {source} has RoPE of type '{kind}' with {odd or rope}; our model has "
                         f"{', '.join(ROPE_TYPES)} with a factor of 1 or more alone. Choose another checkpoint.")
    L = config.get('original_max_position_embeddings') or rope.get('original_max_position_embeddings')
    return {'rope_base': rope.get('rope_theta') or config['rope_theta'], 'rope_length': L if kind == 'yarn' else None,
            'rope_scaling': '' if kind == 'default' else f"{ROPE_TYPES[kind]}:{rope['factor']}"}


def tensor_table(c):
    """{our name: [(their name, shape), ...]}: our matrix is theirs one below the other. c: ModelConfig."""
    C, kv = c.n_embd, c.n_embd // c.n_head * c.n_kv_head
    table = {'embed.weight': [('model.embed_tokens.weight', (c.vocab_size, C))]}
    for i in range(c.n_layer):
        block = {'attn_norm': [('input_layernorm', (C,))],
                 'attn.qkv': [(f'self_attn.{x}_proj', (rows, C)) for x, rows in (('q', C), ('k', kv), ('v', kv))],
                 'attn.out': [('self_attn.o_proj', (C, C))],
                 'mlp_norm': [('post_attention_layernorm', (C,))],
                 'mlp.gate_up': [(f'mlp.{x}_proj', (c.n_hidden, C)) for x in ('gate', 'up')],
                 'mlp.out': [('mlp.down_proj', (C, c.n_hidden))]}
        table |= {f'blocks.{i}.{ours}.weight': [(f'model.layers.{i}.{name}.weight', shape) for name, shape in parts]
                  for ours, parts in block.items()}
    table['norm.weight'] = [('model.norm.weight', (C,))]
    return table if c.tied else table | {'head.weight': [('lm_head.weight', (c.vocab_size, C))]}


def weight_files(folder):
    """
    The files of a folder that hold its weights. Raises ValueError for an index that names anything
    but regular files of this folder; the hub's own cache has links to such files there.
    """
    for name in ('model.safetensors', 'pytorch_model.bin'):
        index, names = folder / f'{name}.index.json', [name]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text())['weight_map'].values()))
                names = [str(name) for name in names]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f'{index} does not tell which file has which tensor. Get it again.') from error
        if index.is_file() or (folder / name).is_file():
            break
    else:
        raise ValueError(f'{folder} has neither model.safetensors nor pytorch_model.bin. Put the weights there.')
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names '{name}', which is not a file of its own folder. "
                             'Get it again.')
        if not (folder / name).is_file():  # it may be a device, such as /dev/zero, which has no end
            raise ValueError(f'{folder / name} is missing or not a file of weights. Get it again.')
    return [folder / name for name in names]


def read_weights(folder):
    """{name: tensor} of all weight files, mapped: a tensor takes memory only once it is used."""
    tensors = {}
    for path in weight_files(folder):
        safetensors = optional('safetensors') if path.suffix == '.safetensors' else None
        with open(path, 'rb') as file:  # an OSError, such as for permissions, names the file
            is_zip = file.read(4) == b'PK\x03\x04'
        try:
            if safetensors:
                with safetensors.safe_open(path, 'pt') as file:
                    part = {name: file.get_tensor(name) for name in file.keys()}
            else:  # the older kind of file, which is no zip, cannot be mapped
                part = torch.load(path, map_location='cpu', weights_only=True, mmap=is_zip)
            tensors |= part
        except Exception as error:  # of safetensors, zip or unpickling alike
            raise ValueError(f'{path} is missing, cut short or not a file of weights ({type(error).__name__}). '
                             'Get it again.') from error
        if is_zip:
            require_checksums(path, part, 'Get it again.')
    return {name: tensor for name, tensor in tensors.items()
            if torch.is_tensor(tensor) and not name.endswith('rotary_emb.inv_freq')}


def our_state(tensors, c, source):
    """Our state dict from their tensors, which it uses up one by one. Vectors become float32, matrices stay."""
    def take(name, shape):
        weight = tensors.pop(name)
        if weight.shape != shape or weight.dtype not in DTYPES.values():
            raise ValueError(f'{name} of {source} is {tuple(weight.shape)} {weight.dtype}, but config.json calls for '
                             f"{shape} in {', '.join(DTYPES)}. Do both belong together?")
        return weight.float() if weight.dim() == 1 else weight

    if c.n_layer > len(tensors):
        raise ValueError(f'config.json of {source} calls for {c.n_layer} layers, but its weights '
                         f'are only {len(tensors)} tensors. Do both belong together?')
    table, state = tensor_table(c), {}
    # head scales, as the paper's own code keeps them: of all layers, or of none
    scales = [f'model.layers.{i}.self_attn.scale_param' for i in range(c.n_layer)]
    scales = scales if any(name in tensors for name in scales) else []
    missing = [*(name for parts in table.values() for name, _ in parts), *scales]
    missing = [name for name in missing if name not in tensors]
    if missing:
        raise ValueError(f"{source} lacks {len(missing)} tensors: {', '.join(missing[:3])} ... Is it a whole Llama?")
    for ours, parts in table.items():
        weights = [take(*part) for part in parts]
        state[ours] = torch.cat(weights) if len(weights) > 1 else weights[0]
    for i in range(c.n_layer):
        state[f'blocks.{i}.attn.head_scale'] = take(scales[i], (c.n_head,)) if scales else torch.ones(c.n_head)
        state[f'blocks.{i}.attn.head_gain'] = torch.ones(c.n_head)
    if scales:
        values = torch.cat([state[f'blocks.{i}.attn.head_scale'] for i in range(c.n_layer)])
        print(f'{source} has head scales of its own, {values.min():.3f} to {values.max():.3f}', flush=True)
    if c.tied:
        state['head.weight'] = state['embed.weight']
        if not torch.equal(tensors.pop('lm_head.weight', state['embed.weight']), state['embed.weight']):
            raise ValueError(f'config.json of {source} ties the output to the embedding, but lm_head.weight differs. '
                             'Set tie_word_embeddings to false there if the output was trained on its own.')
    if tensors:
        raise ValueError(f"{source} has {len(tensors)} tensors that our model has no place for: "
                         f"{', '.join(list(tensors)[:3])} ... Choose another checkpoint.")
    return state


def load_tokenizer(folder, vocab_size):
    """State of the folder's tokenizer. Raises ValueError if there is none, or one with more tokens than the model."""
    path = folder / 'tokenizer.json'
    if not path.is_file():
        raise ValueError(f'{folder} has no tokenizer.json. Put that of the model, or of the one it was trained from, '
                         'there (if this is the cache of the hub: into a folder of your own, with the other files).')
    encoding = get_tokenizer(str(path))
    if encoding.n_vocab > vocab_size:
        raise ValueError(f'{path} has {encoding.n_vocab} tokens but the model only {vocab_size}. Put its own there.')
    return tokenizer_state(encoding)


def load_folder(source, position=None):
    """
    A checkpoint in our format, {model, model_config, tokenizer, step, settings}, from a Llama or SmolLM3 source.
    position: how it was trained, such as 'none' for a NoPE model whose config.json says Llama.
    """
    config = read_config(source)
    try:
        c = our_config(config, source, position)
    except (TypeError, AttributeError) as error:  # such as null where a number or a list should be
        raise ValueError(f'config.json of {source} has an entry of the wrong kind: {error}. '
                         'Get it again.') from error
    folder = model_files(source)
    tokenizer, tensors = load_tokenizer(folder, c.vocab_size), read_weights(folder)
    if position is None and config['model_type'] == 'llama':
        if any(name.endswith('.self_attn.scale_param') for name in tensors):
            raise ValueError(f"{source} has head scales (scale_param), which the paper's code gives "
                             'to models without position encoding, but its config says Llama. '
                             'Add --position=none, or --position=rope if it was trained with RoPE.')
        print(f'{source}: its config says Llama, read as RoPE; a checkpoint trained without position encoding says '
              'the same: if its card says NoPE, add --position=none', flush=True)
    return {'tokenizer': tokenizer, 'model': our_state(tensors, c, source),
            'model_config': dataclasses.asdict(c), 'step': 0, 'settings': {}}


# ----------------------------------------------------------------------------- out

# what of a ModelConfig a config.json says; without dape_kernel, the rest of DAPE's says nothing
EXPORTED = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'n_hidden',
            'position', 'rope_base', 'rope_scaling', 'rope_length', 'tied', 'norm_eps',
            'dape_width', 'dape_residual', 'dape_cheat')


def require_exportable(model):
    """Raise ValueError if a model has a setting or a weight that a stock model has no place for."""
    c = model.config
    method = f"position '{c.position}'" + (' with DAPE' if getattr(c, 'dape_kernel', 0) else '')
    if method not in ("position 'rope'", "position 'none'"):
        raise ValueError(f'{method} changes attention in a way that no model of transformers with our other parts '
                         'does. Only rope and none can be exported.')
    odd = [f'{field.name} {getattr(c, field.name)}' for field in dataclasses.fields(c)
           if field.name not in EXPORTED and getattr(c, field.name) != field.default]
    known = {*tensor_table(c), 'head.weight'}
    folded = '.attn.head_scale', '.attn.head_gain'
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    odd += [name for name, _ in tensors if name not in known and not name.endswith(folded)]
    if odd:
        raise ValueError(f"the model has {', '.join(odd[:3])}, for which a model of transformers has "
                         'no place that we know: the folder would be another model. Export one without.')


def their_config(c, dtype, encoding, length=0):
    """
    A config.json: RoPE is Llama, NoPE is SmolLM3 with RoPE in no layer; encoding: the tokenizer;
    length: the tokens its scales are for, if more than L.
    """
    kind, factor = parse_scaling(c.rope_scaling)
    D, L, base, rope = c.n_embd // c.n_head, c.rope_length or c.block_size, c.rope_base, None
    if kind == 'ntk':  # nothing but a larger base, which the second frequency, base^(-2/D), tells
        base = rope_frequencies(D, base, c.rope_scaling, L, L)[0][1].item() ** (-D / 2)
    elif kind:
        rope = {'rope_type': {ours: theirs for theirs, ours in ROPE_TYPES.items()}[kind], 'factor': factor}
        rope |= {'original_max_position_embeddings': L} if kind == 'yarn' else {}
    longest = L if kind == 'dynamic_ntk' else max(c.block_size, length, int(factor * L) if kind else 0)
    what = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM']} if c.position == 'rope' else {
        'model_type': 'smollm3', 'architectures': ['SmolLM3ForCausalLM'], 'no_rope_layers': [0] * c.n_layer}
    return what | {  # RoPE in the older way, which every version of transformers reads
        'vocab_size': c.vocab_size, 'hidden_size': c.n_embd, 'intermediate_size': c.n_hidden, 'hidden_act': 'silu',
        'num_hidden_layers': c.n_layer, 'num_attention_heads': c.n_head, 'num_key_value_heads': c.n_kv_head,
        'max_position_embeddings': longest,  # dynamic NTK takes it for L, others for how far the model reads
        'rope_theta': base, 'rope_scaling': rope, 'rms_norm_eps': c.norm_eps, 'tie_word_embeddings': c.tied,
        'attention_bias': False, 'mlp_bias': False, 'dtype': str(dtype).removeprefix('torch.'),
        'bos_token_id': start_token(encoding), 'eos_token_id': encoding.eot_token, 'pad_token_id': None}


@torch.no_grad()
def their_state(model, dtype):
    """Their tensors from our model's, head scales folded into the rows of q, head gains into the columns of o."""
    tensors = {}
    for ours, parts in tensor_table(model.config).items():
        weight = model.get_parameter(ours).float()
        if '.attn.' in ours:
            attn = model.get_submodule(ours.rpartition('.attn.')[0] + '.attn')
            if 'qkv' in ours:  # RoPE turns q, which a scale on q does not mind
                scale = attn.head_scale.repeat_interleave(attn.head_dim)
                weight = torch.cat((weight[:len(scale)] * scale[:, None], weight[len(scale):]))
            else:
                weight = weight * attn.head_gain.repeat_interleave(attn.head_dim)
        for (name, _), rows in zip(parts, weight.split([shape[0] for _, shape in parts])):
            # copies, as safetensors takes no two tensors in one memory; vectors are few and stay float32
            tensors[name] = rows.to(dtype if rows.dim() == 2 else torch.float32, copy=True)
            if not tensors[name].isfinite().all():
                raise ValueError(f'{name} is not finite in {tensors[name].dtype}, with its scales. '
                                 'Export with a larger --dtype, such as float32, or smaller scales.')
    return tensors


def tokenizer_json(state):
    """The text of a tokenizer.json that encodes as the tokenizer of this state (corpus.tokenizer_state) does."""
    if state['kind'] == 'hf':
        return state['text']
    package, ranks, char = optional('tokenizers'), parse_ranks(state['text'], state['name']), byte_characters()
    text = {token: ''.join(char[byte] for byte in token) for token in ranks}
    # tiktoken merges any two neighbours that make a token, lowest rank first: so every cut of a token is a merge
    merges = [(text[token[:i]], text[token[i:]]) for token in sorted(ranks, key=ranks.get)
              for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
    vocab = {text[token]: rank for token, rank in ranks.items()}
    if state['eot_token'] != len(vocab):  # where ids are left out, end-of-text would not get its own by itself
        vocab[EOT] = state['eot_token']
    tokenizer = package.Tokenizer(package.models.BPE(vocab, merges, ignore_merges=True))
    words = package.pre_tokenizers.Split(package.Regex(state['pattern']), 'isolated')
    byte_level = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = package.pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer.to_str()


def save_folder(folder, model, tokenizer, dtype, length=0):
    """
    Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json for AutoModelForCausalLM and
    AutoTokenizer of stock transformers: all of them or none. tokenizer: its state; dtype: of the matrices; length: the
    tokens that the scales are for. Of scale sets the caller chooses one: model.use_set(). Raises ValueError for what
    stock models cannot do.
    """
    safetensors, folder = optional('safetensors.torch'), Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f'{folder} exists and is not an empty folder. Remove it or choose another folder.')
    require_exportable(model)
    encoding = tokenizer_from_state(tokenizer)
    config = their_config(model.config, dtype, encoding, length)
    folder.parent.mkdir(parents=True, exist_ok=True)
    need, free = model.n_params() * dtype.itemsize + 2 ** 24, shutil.disk_usage(folder.parent).free
    if free < need:
        raise ValueError(f'{folder} needs {need / 1e9:.2f} GB but {free / 1e9:.2f} GB are free. Free some space.')
    part = folder.with_name(folder.name + '.part')
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        part.mkdir()
        save_json(part / 'config.json', config)
        write_text(part / 'tokenizer.json', tokenizer_json(tokenizer))
        bos, eos = (encoding.decode_bytes([config[f'{x}_token_id']]).decode() for x in ('bos', 'eos'))
        save_json(part / 'tokenizer_config.json', {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': eos}
                  | ({'bos_token': bos} if bos != eos else {}))
        safetensors.save_file(their_state(model, dtype), part / 'model.safetensors', metadata={'format': 'pt'})
        part.replace(folder)
    except optional('safetensors').SafetensorError as error:
        raise OSError(f'could not write {folder} ({error}). Is the disk full?') from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


# ----------------------------------------------------------------------------- others, through transformers

class ForeignCache:
    """Keys and values as transformers keeps them, behind the calls of our KVCache."""

    def __init__(self, keys, max_length):
        self.keys, self.length, self.max_length = keys, 0, max_length

    def repeat(self, n):
        self.keys.batch_repeat_interleave(n)

    def reorder(self, source, start):
        self.keys.reorder_cache(source)


class Foreign(nn.Module):
    """A causal model of transformers behind the calls of our Transformer. It has no scales to set."""

    logits_per_chunk, sets = Transformer.logits_per_chunk, {}
    length_matters = True  # so that prompts of unequal length are read one by one
    forward, losses = Transformer.forward, Transformer.losses
    passes, n_params = Transformer.passes, Transformer.n_params

    def __init__(self, model):
        super().__init__()
        self.model, c = model, model.config
        names = ('seq_length', 'max_seq_len', 'n_positions', 'max_position_embeddings')
        L = next((getattr(c, name) for name in names if getattr(c, name, None)), 2048)
        self.config = SimpleNamespace(vocab_size=c.vocab_size, block_size=L, n_layer=c.num_hidden_layers,
                                      n_head=c.num_attention_heads, position=c.model_type, rope_scaling='')

    @property
    def head(self):
        return self.model.get_output_embeddings()

    def hidden(self, idx, cache=None, last=0):
        """idx: (B, T) token ids. Returns (B, T, C), ready for the output matrix, whatever `last` asks for."""
        c, store = self.model.config, cache or ForeignCache(None, None)
        end = store.length + idx.shape[1]
        if cache and end > store.max_length:
            raise ValueError(f'the KV cache holds {store.max_length} tokens but {end} are needed. Make it longer.')
        if end > getattr(c, 'n_positions', end):
            raise ValueError(f'a {c.model_type} model has {c.n_positions} positions but {end} are needed. '
                             'Choose a shorter length.')
        if end > getattr(c, 'max_seq_len', end):
            c.max_seq_len = end  # MPT makes its ALiBi biases for so many tokens; more change nothing for fewer
        store.length = end
        return self.model.base_model(idx, past_key_values=store.keys, use_cache=bool(cache))[0]

    def new_cache(self, batch_size, max_length, dtype=None):
        """A cache of up to max_length tokens. The other arguments are the model's own affair."""
        return ForeignCache(optional('transformers').DynamicCache(config=self.model.config), max_length)

    def refuse(self, *_):
        raise ValueError(f'a {self.config.position} model is read through transformers: no scale of it can be tuned or '
                         'applied, nor its entropy measured. Take a Llama-type checkpoint for that.')

    head_scale = property(refuse, refuse)
    losses_and_entropy = refuse


def load_foreign(source, dtype=torch.float32):
    """A Foreign model, and the rest of a checkpoint as in load_folder(). dtype: of its weights."""
    auto, folder = optional('transformers').AutoModelForCausalLM, model_files(source)
    optional('transformers.utils.logging').disable_progress_bar()
    tensors = read_weights(folder)  # mapped; transformers checks neither names nor checksums
    held = sum(tensor.numel() for tensor in tensors.values())
    try:
        configs = optional('transformers').AutoConfig
        config = configs.from_pretrained(folder, trust_remote_code=False)
        names = ('num_hidden_layers', 'hidden_size', 'vocab_size')
        sizes = {name: getattr(config, name, 0) for name in names}
        too_large = sizes['num_hidden_layers'] > len(tensors) or max(sizes.values()) > held
    except Exception as error:
        raise ValueError(f'transformers cannot read config.json of {source} '
                         f'({type(error).__name__}: {error}). '
                         'Choose another checkpoint, or get its files again.') from error
    if too_large:
        raise ValueError(f'config.json of {source} calls for {sizes}, but its weights are '
                         f'{len(tensors)} tensors of {held:,} numbers. Do both belong together?')
    del tensors
    try:
        model, report = auto.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=False,
                                             output_loading_info=True)
    except Exception as error:  # of its many loaders
        raise ValueError(f'transformers cannot read {source}: {str(error).splitlines()[0]} Choose another checkpoint, '
                         'or get its files again.') from error
    if report['missing_keys']:  # transformers would go on with random weights
        raise ValueError(f"{source} lacks weights: {', '.join(sorted(report['missing_keys'])[:3])} ... Get it again.")
    model, idx = Foreign(model.eval()), torch.tensor([[0, 1]])
    with torch.no_grad():  # some types change logits after the output matrix, which forward() would miss
        if not torch.allclose(model(idx), model.model(idx).logits, rtol=1e-3, atol=1e-4):
            raise ValueError(f'{source}: the logits of a {model.config.position} model are more than its output matrix '
                             'times its last state, which we do not read. Choose another checkpoint.')
    return model, {'model_config': vars(model.config), 'tokenizer': load_tokenizer(folder, model.config.vocab_size),
                   'step': 0, 'settings': {}}
