"""
Models of others, in and out. No code that comes with a model is run.

In: every stage that reads a model takes as --init_from a Hugging Face folder, hf:ORG/NAME or
hf:ORG/NAME@REVISION, or a GGUF file.
A model of type llama (TinyLlama, Llama 1 to 3, SmolLM2), smollm3 or granitemoehybrid becomes one of
ours, unless it computes something that our model does not. transformers runs all other causal
models, such as BLOOM or Qwen3: they can be evaluated and sampled from, but not tuned, trained or
written. The config.json of a NoPE model may say llama, as that of hf:AntNLP/TinyLlama-NoPE-1.1B
does. It is then read with RoPE, unless you give --position=none or the paper's code left head
scales in it. Of GGUF files those of a Llama or Granite are read, whatever their quantization, as
float32.

Out: a new folder for transformers and vLLM, or for llama.cpp. NoPE becomes Granite without position
embedding, RoPE becomes Llama, and a pattern of both becomes SmolLM3. The softmax scales become part
of the weights of q, so that they cost nothing.

$ python -m extras.convert --folder=out/demo/hf                       # as trained
$ python -m extras.convert --folder=out/demo/hf_640 --scale=out/demo/nope/scale_head_640.json
$ python -m extras.convert --folder=out/demo/gguf --format=gguf       # pip install ".[gguf]"

Writes the folder: the model, its tokenizer, and README.md, which says how it was made
"""

import math
from pathlib import Path

from configurator import UserError, configure

import torch

from common import DTYPES, model_config, save_json, setup, weights_digest
from extras import gguf_file
from extras.foreign import LOCAL, Foreign
from model import ModelConfig
from position import NoPE, RoPE, split_scaling, unused_settings
from stage import open_model
from tokenizer import EOT, get_tokenizer, parse_ranks, start_token, tokenizer_state

# which model
out_dir = 'out/demo/nope'    # folder of the run to read
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# what to write
folder = ''                  # the new folder
format = 'hf'                # hf: for transformers and vLLM; gguf: for llama.cpp
target_length: int | None = None  # longest text in tokens; of several sets of scales takes its own;
                             # None: what the scale file is tuned for, without a file block_size
dtype = 'bfloat16'           # of the written matrices: float32, bfloat16, float16


# ---------------------------------------------------------------------- names of weights

# {our weight: its name in a folder}. * is a layer. Of several names the rows follow each other in
# ours. Example: with 4 heads of 16 channels for q, and 2 for k and for v, the 128 rows of qkv are
# the 64 of q, the 32 of k and the 32 of v.
LLAMA = {
    'embed': 'model.embed_tokens', 'norm': 'model.norm', 'head': 'lm_head',
    'blocks.*.attn_norm': 'model.layers.*.input_layernorm',
    'blocks.*.attn.qkv': 'model.layers.*.self_attn.q_proj model.layers.*.self_attn.k_proj '
                         'model.layers.*.self_attn.v_proj',
    'blocks.*.attn.out': 'model.layers.*.self_attn.o_proj',
    'blocks.*.mlp_norm': 'model.layers.*.post_attention_layernorm',
    'blocks.*.mlp.gate_up': 'model.layers.*.mlp.gate_proj model.layers.*.mlp.up_proj',
    'blocks.*.mlp.out': 'model.layers.*.mlp.down_proj'}
# Granite with attention in every layer and no experts is a Llama with other names.
GRANITE = LLAMA | {'blocks.*.mlp.gate_up': 'model.layers.*.shared_mlp.input_linear',
                   'blocks.*.mlp.out': 'model.layers.*.shared_mlp.output_linear'}
WEIGHTS = {'llama': LLAMA, 'smollm3': LLAMA, 'granitemoehybrid': GRANITE}


class Unlike(ValueError):
    """A model computes something that ours does not."""


def weight_names(c, table):
    """{our weight: its names elsewhere}. c: a ModelConfig; table: such as LLAMA."""
    names = {}
    for ours, theirs in table.items():
        for i in range(c.n_layer if '*' in ours else 1):
            parts = theirs.replace('*', str(i)).split()
            names[ours.replace('*', str(i)) + '.weight'] = [f'{part}.weight' for part in parts]
    if c.tied:
        names['head.weight'] = names['embed.weight']
    return names


def our_weights(c, tensors, table):
    """Our weights from {name elsewhere: tensor}. Raises Unlike if we have no place for one."""
    names = weight_names(c, table)
    odd = tensors.keys() - sum(names.values(), ['lm_head.weight'])  # there may be a copy, if tied
    odd = [name for name in odd if not name.endswith('inv_freq')]
    if odd:  # biases, experts ...
        raise Unlike(f'it has {odd[0]}')
    return {ours: torch.cat([tensors[part] for part in parts]) for ours, parts in names.items()}


# ---------------------------------------------------------------------- in: folders

def folder_of(source):
    """The folder of a source. From the hub only what we read is downloaded, once."""
    if not source.startswith('hf:'):
        return Path(source)
    from huggingface_hub import snapshot_download
    name, _, revision = source[3:].partition('@')
    for weights in 'model*.safetensors', 'pytorch_model*.bin':
        path = Path(snapshot_download(name, revision=revision or None,
                                      allow_patterns=['*.json', weights]))
        if any(path.glob(weights)):
            break
    return path


def trained_position(config):
    """The position method of a Llama, SmolLM3 or Granite."""
    kind = getattr(config, 'position_embedding_type', 'rope')  # only Granite has it
    if kind not in (None, 'none', 'nope', 'rope'):  # transformers would take it for NoPE
        raise ValueError(f'position_embedding_type {kind} is unknown')
    layers = getattr(config, 'no_rope_layers', [kind == 'rope'])  # only SmolLM3 has it
    names = ['rope' if has_rope else 'none' for has_rope in layers]
    # the least n with which the layers repeat: rope, none, rope, none has 2 and becomes rope,none
    period = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ','.join(names[:period])


# {our setting: its name in a config.json}, for reading and writing
SETTINGS = {
    'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
    'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
    'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size', 'n_hidden': 'intermediate_size',
    'norm_eps': 'rms_norm_eps', 'rope_base': 'rope_theta', 'tied': 'tie_word_embeddings'}
# {rope_type: our rope_scaling}
SCALINGS = {'default': '', 'linear': 'pi:{factor:.12g}', 'dynamic': 'dynamic_ntk:{factor:.12g}',
            'yarn': 'yarn:{factor:.12g}', 'llama3': 'llama3:{factor:.12g}'}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}  # of the rope_type llama3
# What our model computes, where a config.json may ask for something else
FIXED = LLAMA3 | {
    'hidden_act': 'silu', 'embedding_multiplier': 1, 'residual_multiplier': 1, 'logits_scaling': 1,
    'partial_rotary_factor': 1, 'beta_fast': 32, 'beta_slow': 1, 'attention_factor': None,
    'mscale': None, 'mscale_all_dim': None, 'truncate': True}
SCALES = 'model.layers.{}.self_attn.scale_param'  # head scales of a layer, in the paper's code


def read_llama(path, position):
    """
    Our weights and the ModelConfig of a folder with a Llama, SmolLM3 or Granite. Raises Unlike if
    it has another model, or one that computes what ours does not.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig
    config = AutoConfig.from_pretrained(path, **LOCAL)
    if config.model_type not in WEIGHTS:
        raise Unlike(f'its type is {config.model_type}')
    rope, D = config.rope_parameters, config.hidden_size // config.num_attention_heads
    entries = config.to_dict() | rope
    fixed = FIXED | {'head_dim': D, 'attention_multiplier': D ** -0.5,
                     # a config.json may say 'attention', which transformers renames on reading
                     'layer_types': ['full_attention'] * config.num_hidden_layers}
    for name, value in fixed.items():
        its = entries.get(name)
        near = isinstance(its, float) and value and math.isclose(its, value, rel_tol=1e-6)
        if its not in (None, value) and not near:
            raise Unlike(f'its {name} is {its}')
    if rope['rope_type'] not in SCALINGS:
        raise Unlike(f"its rope_type is {rope['rope_type']}")

    tensors, scales, trained = {}, {}, trained_position(config)
    files = 'model.safetensors', 'model-*.safetensors', 'pytorch_model*.bin'
    for file in next(filter(None, (sorted(path.glob(kind)) for kind in files)), ()):
        tensors |= (load_file(file) if file.suffix == '.safetensors' else
                    torch.load(file, 'cpu', weights_only=True, mmap=True))
    if SCALES.format(0) in tensors:  # only NoPE models have them
        trained = 'none'
        for i in range(config.num_hidden_layers):
            row = tensors.pop(SCALES.format(i))              # (H,)
            scales[f'blocks.{i}.attn.head_scale'] = row[:, None].clone()
    values = {ours: entries[theirs] for ours, theirs in SETTINGS.items()}
    values |= {'position': position or trained,
               'rope_scaling': SCALINGS[rope['rope_type']].format(**rope),
               'n_hidden': entries.get('shared_intermediate_size') or values['n_hidden'],
               'pretrained_length': entries.get('original_max_position_embeddings')}
    if rope['rope_type'] == 'dynamic':
        values['pretrained_length'] = None  # L is max_position_embeddings
    # unused_settings() gives the default of each setting that the position method does not have. It
    # replaces the value in the file: with 'none', rope_base becomes 10000.
    c = model_config(values | unused_settings(values))
    head, embed = (tensors.get(f'{name}.weight') for name in ('lm_head', 'model.embed_tokens'))
    if c.tied and head is not None and not torch.equal(head, embed):  # as transformers reads it
        c.tied = False
    return scales | our_weights(c, tensors, WEIGHTS[config.model_type]), c


def read(source, position=None, dtype=torch.float32):
    """
    A model of others, as read_checkpoint() returns one of ours. `model` is a state dict in our
    names, or a Foreign with weights of this dtype. position: the method that a folder's model was
    trained with; None: as its config.json says.
    """
    tokenizer = None
    try:
        if source.endswith('.gguf'):
            c, tensors, tokenizer = gguf_file.read(source)
            model = our_weights(c, tensors, gguf_file.WEIGHTS)
        else:
            path = folder_of(source)
            try:
                model, c = read_llama(path, position)
            except Unlike as reason:
                # a str, because the exception's traceback would keep the weights of read_llama()
                model = Foreign(path, dtype, str(reason))
                c = model.config
            if (path / 'tokenizer.json').is_file():
                tokenizer = tokenizer_state(get_tokenizer(str(path / 'tokenizer.json')))
    except Exception as error:  # those of the libraries share no class
        raise UserError(f'{source} cannot be read: {error!r:.300} It must be a Hugging Face '
                        'folder, hf:ORG/NAME or the whole GGUF file of a Llama or Granite, and '
                        'this needs pip install ".[gguf]".') from error
    if not tokenizer:
        print(f'{source} has no tokenizer.json. Is the text encoded by its tokenizer? Nothing can '
              'check this.')
    if isinstance(model, dict):
        digest = weights_digest(model)
    else:  # the same whether the model was read in float32 or bfloat16
        digest = weights_digest(model.state_dict(), torch.bfloat16)
    return {'model': model, 'model_config': c, 'digest': digest, 'step': 0, 'settings': {},
            'tokenizer': tokenizer, 'path': source}


# ---------------------------------------------------------------------- out: weights and settings

def require_exportable(model):
    """Refuse a model that no stock model can hold, because the folder would compute otherwise."""
    blocks, c = model.blocks, model.config
    names = *SETTINGS, 'position', 'pretrained_length', 'rope_scaling'
    # true if everything else, such as short_conv, is at its default
    is_plain = c == ModelConfig(**{name: getattr(c, name) for name in names})
    has_others = {type(block.attn.position) for block in blocks} - {NoPE, RoPE}
    if has_others or not is_plain or 'ntk' in c.rope_scaling:
        raise UserError('Only NoPE, RoPE and patterns of both can be written, without a window, '
                        'p-RoPE, NTK, DAPE or short convolutions.')


@torch.no_grad()
def fold(model):
    """Make head scales a part of the rows of q, and head gains of the columns of out."""
    C, D = model.config.n_embd, model.config.head_dim
    if 'rope' in model.config.position and model.head_scale.dim() == 3:
        raise UserError('With RoPE a scale per channel cannot be written, because it acts after '
                        "RoPE's rotation and the weights of q come before it.")
    for block in model.blocks:
        attention = block.attn
        scale, gain = attention.head_scale, attention.head_gain              # (H, 1) or (H, D)
        attention.qkv.weight[:C] *= scale.expand(-1, D).reshape(C, 1)
        attention.out.weight *= gain.expand(-1, D).flatten()
        scale.fill_(1)
        gain.fill_(1)


def their_weights(model, table):
    """{name elsewhere: float32 tensor} of a model after fold(). table: such as LLAMA."""
    c, weights, theirs = model.config, model.state_dict(), {}
    kv = c.n_kv_head * c.head_dim
    for ours, names in weight_names(c, table).items():
        weight = weights[ours]
        rows = [c.n_embd, kv, kv] if 'qkv' in ours else len(weight) // len(names)
        theirs |= zip(names, weight.split(rows))
    return theirs


def their_config(c, encoding, dtype):
    """The config.json of a model, as a dict. dtype: name of the dtype of its matrices."""
    kind, architecture = {
        'none': ('granitemoehybrid', 'GraniteMoeHybridForCausalLM'),
        'rope': ('llama', 'LlamaForCausalLM'),
    }.get(c.position, ('smollm3', 'SmolLM3ForCausalLM'))
    config = {theirs: getattr(c, ours) for ours, theirs in SETTINGS.items()} | {
        'model_type': kind, 'architectures': [architecture], 'dtype': dtype,
        'original_max_position_embeddings': c.pretrained_length,
        'bos_token_id': start_token(encoding), 'eos_token_id': encoding.eot_token,
        'pad_token_id': None}  # transformers never trains its row of the embedding
    if c.position == 'none':
        return config | {
            'position_embedding_type': 'nope', 'shared_intermediate_size': c.n_hidden,
            # the word of Granite's files; transformers renames it to 'full_attention' on reading
            'layer_types': ['attention'] * c.n_layer, 'num_local_experts': 0,
            'attention_multiplier': c.head_dim ** -0.5,
            'mamba_n_heads': 1}  # no layer has it, but it must divide twice the width
    if kind == 'smollm3':
        layers = range(c.n_layer)
        config['no_rope_layers'] = [int(c.methods[n % len(c.methods)] == 'rope') for n in layers]
    scaling, factor = split_scaling(c.rope_scaling)
    rope = {'rope_type': {'pi': 'linear'}.get(scaling, scaling), 'factor': factor}
    if scaling in ('yarn', 'llama3'):
        rope['original_max_position_embeddings'] = c.pretrained_length
    if scaling == 'llama3':
        rope |= LLAMA3
    # in their older form, because newer versions of transformers read it, too
    return config | {'rope_scaling': rope if scaling else None}


# ---------------------------------------------------------------------- out: files

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


def write_folder(path, model, text, encoding, dtype):
    """
    Write what AutoModelForCausalLM and AutoTokenizer of unmodified transformers load. text: of
    tokenizer.json; encoding: that tokenizer; dtype: of the matrices.
    """
    from safetensors.torch import save_file
    config = their_config(model.config, encoding, dtype)
    save_json(path / 'config.json', config)
    end = getattr(encoding, 'eos', EOT)  # its name in a tokenizer.json
    save_json(path / 'tokenizer_config.json', {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': end, 'pad_token': end,
        'padding_side': 'left'})
    (path / 'tokenizer.json').write_text(text, encoding='utf-8')
    weights = their_weights(model, WEIGHTS[config['model_type']])
    for name, weight in weights.items():
        its = DTYPES[dtype] if weight.dim() == 2 else torch.float32
        weights[name] = weight.to(its, copy=True)
    save_file(weights, path / 'model.safetensors', {'format': 'pt'})


def main(given):
    path = Path(folder)
    is_new = not path.is_file() and not any(path.glob('*'))
    if format not in ('hf', 'gguf') or dtype not in DTYPES or not is_new:
        raise UserError(f"Give a new --folder= (it is '{folder}'), --format=hf or gguf, and "
                        f"--dtype={', '.join(DTYPES)}.")
    runtime = setup('cpu', 'float32')
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    require_exportable(model)
    if model.scale_sets:
        if not target_length:
            raise UserError(f'{scale} has sets for {[*model.scale_sets]} tokens. Choose one of '
                            'these lengths, or one in between: --target_length=N.')
        model.take_set(target_length)
    fold(model)
    c, encoding = model.config, get_tokenizer(info['tokenizer'])
    text = tokenizer_json(info['tokenizer'])
    c.block_size = max(c.block_size, target_length or info['tuned_length'],
                       int(split_scaling(c.rope_scaling)[1] * c.pretrained_length))
    path.mkdir(parents=True, exist_ok=True)
    if format == 'hf':
        write_folder(path, model, text, encoding, dtype)
    else:
        weights = their_weights(model, gguf_file.WEIGHTS)
        gguf_file.write(path / 'model.gguf', c, weights, text, encoding, dtype)
    (path / 'README.md').write_text(
        f"A causal transformer with position method {c.position} {c.rope_scaling}, trained on "
        f"windows of {c.pretrained_length} tokens.\nIts weights contain the softmax scales "
        f"{scale or 'of the checkpoint'}.\n", encoding='utf-8')
    print(f"{info['path']} is now {folder}, in {dtype}")


if __name__ == '__main__':
    main(configure(globals()))
