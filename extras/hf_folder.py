"""
Folders of Hugging Face: a Llama (TinyLlama, Llama 1 to 3, SmolLM2), a SmolLM3 or a Granite is read
as one of our models, and ours are written as a Llama or a SmolLM3. convert.py calls this.
"""

import torch

from common import DTYPES, model_config, save_json
from extras.foreign import LOCAL
from position import split_scaling, unused_settings
from tokenizer import EOT, get_tokenizer, parse_ranks, start_token

# {our weight: its names in a folder}, * is a layer. Of several names the rows follow each other in
# ours. Example: with 4 heads of 16 channels for q, and 2 for k and for v, the 128 rows of qkv are
# the 64 of q, the 32 of k and the 32 of v.
LLAMA = {
    'embed': ['model.embed_tokens'], 'norm': ['model.norm'], 'head': ['lm_head'],
    'blocks.*.attn_norm': ['model.layers.*.input_layernorm'],
    'blocks.*.attn.qkv': ['model.layers.*.self_attn.q_proj', 'model.layers.*.self_attn.k_proj',
                          'model.layers.*.self_attn.v_proj'],
    'blocks.*.attn.out': ['model.layers.*.self_attn.o_proj'],
    'blocks.*.mlp_norm': ['model.layers.*.post_attention_layernorm'],
    'blocks.*.mlp.gate_up': ['model.layers.*.mlp.gate_proj', 'model.layers.*.mlp.up_proj'],
    'blocks.*.mlp.out': ['model.layers.*.mlp.down_proj']}
# Granite with attention in every layer and no experts is a Llama with other names.
GRANITE = LLAMA | {'blocks.*.mlp.gate_up': ['model.layers.*.shared_mlp.input_linear'],
                   'blocks.*.mlp.out': ['model.layers.*.shared_mlp.output_linear']}
WEIGHTS = {'llama': LLAMA, 'smollm3': LLAMA, 'granitemoehybrid': GRANITE}  # {model_type: names}

# {our setting: its name in a config.json}
SETTINGS = {
    'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
    'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
    'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size', 'n_hidden': 'intermediate_size',
    'norm_eps': 'rms_norm_eps', 'rope_base': 'rope_theta', 'tied': 'tie_word_embeddings'}
# {rope_type: our kind of rope_scaling}
SCALINGS = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn',
            'llama3': 'llama3'}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}  # of the rope_type llama3
# What our model computes, where a config.json may ask for something else
FIXED = LLAMA3 | {
    'hidden_act': 'silu', 'embedding_multiplier': 1, 'residual_multiplier': 1, 'logits_scaling': 1,
    'partial_rotary_factor': 1, 'beta_fast': 32, 'beta_slow': 1, 'attention_factor': None,
    'mscale': None, 'mscale_all_dim': None, 'truncate': True}


class Unlike(ValueError):
    """A model computes something that ours does not."""


# ---------------------------------------------------------------------- weights

def weight_names(c, table):
    """{our weight: its names elsewhere}. c: a ModelConfig; table: such as LLAMA."""
    names = {}
    for ours, theirs in table.items():
        for i in range(c.n_layer if '*' in ours else 1):
            parts = [f'{part}.weight'.replace('*', str(i)) for part in theirs]
            names[f'{ours}.weight'.replace('*', str(i))] = parts
    if c.tied:
        names['head.weight'] = names['embed.weight']
    return names


def our_weights(c, tensors, table):
    """Our weights from {name elsewhere: tensor}. Raises Unlike if we have no place for one."""
    names = weight_names(c, table)
    unknown = tensors.keys() - sum(names.values(), [])  # sum: all known names in one list
    if unknown:  # biases, experts ...
        raise Unlike(f'it has {min(unknown)}')
    return {ours: torch.cat([tensors[part] for part in parts]) for ours, parts in names.items()}


def their_weights(model, table):
    """{name elsewhere: float32 tensor} of our model. table: such as LLAMA."""
    c, weights, theirs = model.config, model.state_dict(), {}
    kv = c.n_kv_head * c.head_dim
    for ours, names in weight_names(c, table).items():
        weight = weights[ours]
        rows = [c.n_embd, kv, kv] if 'qkv' in ours else len(weight) // len(names)
        theirs |= zip(names, weight.split(rows))
    return theirs


# ---------------------------------------------------------------------- in

def require_like_ours(config):
    """Raise Unlike if a model computes something that ours does not. config: of transformers."""
    if config.model_type not in WEIGHTS:
        raise Unlike(f'its type is {config.model_type}')
    if config.rope_parameters['rope_type'] not in SCALINGS:
        raise Unlike(f"its rope_type is {config.rope_parameters['rope_type']}")
    D = config.hidden_size // config.num_attention_heads
    fixed = FIXED | {
        'head_dim': D, 'attention_multiplier': round(D ** -0.5, 6),
        'layer_types': ['full_attention'] * config.num_hidden_layers}  # not mamba
    entries = config.to_dict() | config.rope_parameters
    for name, value in fixed.items():
        its = entries.get(name)
        if isinstance(its, float):
            its = round(its, 6)  # a file may have 9 digits of 1 / sqrt(D)
        if its not in (None, value):  # None: config.json does not say it, so it is as usual
            raise Unlike(f'its {name} is {its}')


def trained_position(config):
    """The position method of a Llama, SmolLM3 or Granite."""
    kind = getattr(config, 'position_embedding_type', 'rope')  # only Granite has it
    if kind not in (None, 'none', 'nope', 'rope'):  # transformers would take it for NoPE
        raise ValueError(f'position_embedding_type {kind} is unknown')
    layers = getattr(config, 'no_rope_layers', [kind == 'rope'])  # SmolLM3's: 1 means with RoPE
    names = ['rope' if has_rope else 'none' for has_rope in layers]
    n = 1
    while names[n:] != names[:-n]:  # until the layers repeat: rope,none,rope,none has n = 2
        n += 1
    return ','.join(names[:n])


def read_tensors(path):
    """{name: tensor} of the weights in a folder."""
    from safetensors.torch import load_file
    tensors = {}
    for file in sorted(path.glob('model*.safetensors')):  # model.safetensors is last, so it wins
        tensors |= load_file(file)
    if not tensors:
        for file in path.glob('pytorch_model*.bin'):
            tensors |= torch.load(file, 'cpu', weights_only=True, mmap=True)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith('inv_freq')}


def read(path, position=None):
    """
    The ModelConfig and our weights of a folder. position: the method that its model was trained
    with; None: as its config.json says. Raises Unlike if the model computes what ours does not.
    """
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(path, **LOCAL)
    require_like_ours(config)
    tensors, trained, scales = read_tensors(path), trained_position(config), {}
    for i in range(config.num_hidden_layers):
        row = tensors.pop(f'model.layers.{i}.self_attn.scale_param', None)
        if row is not None:  # head scales, (H,), as the paper's code writes them for NoPE models
            scales[f'blocks.{i}.attn.head_scale'] = row[:, None].clone()
            trained = 'none'

    rope = config.rope_parameters
    entries = config.to_dict() | rope
    values = {ours: entries[theirs] for ours, theirs in SETTINGS.items()}
    values['position'] = position or trained
    if 'shared_intermediate_size' in entries:  # of Granite
        values['n_hidden'] = entries['shared_intermediate_size']
    if values['tied'] and 'lm_head.weight' in tensors:  # a copy, or a matrix of its own
        if torch.equal(tensors['lm_head.weight'], tensors['model.embed_tokens.weight']):
            del tensors['lm_head.weight']
        else:
            values['tied'] = False
    scaling = SCALINGS[rope['rope_type']]
    if scaling:
        values['rope_scaling'] = f"{scaling}:{rope['factor']:.12g}"
    if scaling != 'dynamic_ntk':  # there L is max_position_embeddings
        values['pretrained_length'] = entries.get('original_max_position_embeddings')
    # unused_settings() gives the default of each setting that the position method does not have. It
    # replaces the value in the file: with 'none', rope_base becomes 10000.
    c = model_config(values | unused_settings(values))
    return c, scales | our_weights(c, tensors, WEIGHTS[config.model_type])


# ---------------------------------------------------------------------- out

def their_config(c, encoding, dtype):
    """The config.json of a model, as a dict. dtype: name of the dtype of its matrices."""
    has_rope = [int(c.methods[n % len(c.methods)] == 'rope') for n in range(c.n_layer)]
    if all(has_rope):
        kind = {'model_type': 'llama', 'architectures': ['LlamaForCausalLM']}
    else:
        kind = {'model_type': 'smollm3', 'architectures': ['SmolLM3ForCausalLM'],
                'no_rope_layers': has_rope}
    config = {theirs: getattr(c, ours) for ours, theirs in SETTINGS.items()} | kind | {
        'dtype': dtype, 'original_max_position_embeddings': c.pretrained_length,
        'bos_token_id': start_token(encoding), 'eos_token_id': encoding.eot_token,
        'pad_token_id': None}  # transformers never trains its row of the embedding
    scaling, factor = split_scaling(c.rope_scaling)
    if scaling:  # in its older form, because newer versions of transformers read it, too
        config['rope_scaling'] = rope = {
            'rope_type': 'linear' if scaling == 'pi' else scaling, 'factor': factor}
        if scaling != 'pi':
            rope['original_max_position_embeddings'] = c.pretrained_length
        if scaling == 'llama3':
            rope |= LLAMA3
    return config


def tokenizer_json(state):
    """The text of a tokenizer.json that encodes like the tokenizer with this state."""
    if state['kind'] == 'hf':
        return state['text']
    from transformers.convert_slow_tokenizer import TikTokenConverter
    # tiktoken merges any two neighbors that together are a token, lowest rank first. So each way to
    # split a token into two tokens is a merge.
    converter = TikTokenConverter(state['text'], state['pattern'], extra_special_tokens=[EOT])
    converter.load_tiktoken_bpe = parse_ranks  # of a text, not of a file
    return converter.converted().to_str()


def write_tokenizer(path, state):
    """Write what AutoTokenizer loads of the tokenizer with this state into a folder."""
    end = state.get('eos', EOT)
    save_json(path / 'tokenizer_config.json', {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': end, 'pad_token': end,
        'padding_side': 'left'})
    (path / 'tokenizer.json').write_text(tokenizer_json(state), encoding='utf-8')


def write(path, model, state, dtype):
    """
    Write what AutoModelForCausalLM and AutoTokenizer of unmodified transformers load. state: of the
    tokenizer; dtype: of the matrices.
    """
    from safetensors.torch import save_file
    write_tokenizer(path, state)
    save_json(path / 'config.json', their_config(model.config, get_tokenizer(state), dtype))
    weights = their_weights(model, LLAMA)
    for name, weight in weights.items():
        its = DTYPES[dtype] if weight.dim() == 2 else torch.float32
        weights[name] = weight.to(its, copy=True)
    save_file(weights, path / 'model.safetensors', {'format': 'pt'})
