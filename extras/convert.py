"""
Models of others, in and out. No code that comes with a model is run.

In: every stage takes a Hugging Face folder or hf:ORG/NAME[@REVISION] as --init_from. A model of
type llama (TinyLlama, Llama 1 to 3, SmolLM2), smollm3 or granitemoehybrid becomes one of ours,
unless it computes something that our model does not. transformers runs all other causal models,
such as BLOOM or Qwen3: they can be evaluated and sampled from, but not tuned, trained or written.
The config.json of a NoPE model may say llama, as that of hf:AntNLP/TinyLlama-NoPE-1.1B does. It is
then read with RoPE, unless you give --position=none or the paper's code left head scales in it.

Out: a new folder for transformers and vLLM, or for llama.cpp. NoPE becomes Granite without position
embedding, RoPE becomes Llama, and a pattern of both becomes SmolLM3. The softmax scales become part
of the weights of q, so that they cost nothing.

$ python -m extras.convert --folder=out/demo/hf                       # as trained
$ python -m extras.convert --folder=out/demo/hf_640 --scale=out/demo/nope/scale_head_640.json
$ python -m extras.convert --folder=out/demo/gguf --format=gguf       # pip install ".[gguf]"

Writes the folder: its weights and tokenizer, and README.md, which says how to run it
"""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

from configurator import UserError, configure

import torch
import torch.nn as nn
import torch.nn.functional as F

from common import DTYPES, model_config, save_json, setup, weights_digest
from model import ModelConfig
from position import NoPE, RoPE, split_scaling, unused_settings
from stage import open_model
from tokenizer import (
    EOT,
    PATTERN,
    HFTokenizer,
    get_tokenizer,
    parse_ranks,
    start_token,
    tokenizer_state,
)

# which model
out_dir = 'out/demo/nope'    # folder of the run to read
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# what to write
folder = ''                  # the new folder
format = 'hf'                # hf: for transformers and vLLM; gguf: for llama.cpp
target_length: int | None = None  # longest text in tokens; of several sets of scales takes its own
dtype = 'bfloat16'           # of the written matrices: float32, bfloat16, float16

# {our setting: its name in a config.json}
NAMES = {'vocab_size': 'vocab_size', 'block_size': 'max_position_embeddings',
         'n_layer': 'num_hidden_layers', 'n_head': 'num_attention_heads',
         'n_kv_head': 'num_key_value_heads', 'n_embd': 'hidden_size',
         'n_hidden': 'intermediate_size', 'norm_eps': 'rms_norm_eps',
         'tied': 'tie_word_embeddings'}
# {our weight of a layer: its parts in Llama, whose rows follow each other in ours}
PARTS = {
    'attn_norm': 'input_layernorm',
    'attn.qkv': 'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
    'attn.out': 'self_attn.o_proj',
    'mlp_norm': 'post_attention_layernorm',
    'mlp.gate_up': 'mlp.gate_proj mlp.up_proj',
    'mlp.out': 'mlp.down_proj',
}
# Granite with attention in every layer and no experts is a Llama with other names.
GRANITE = 'granitemoehybrid'
GRANITE_PARTS = PARTS | {'mlp.gate_up': 'shared_mlp.input_linear',
                         'mlp.out': 'shared_mlp.output_linear'}
# {our setting: its name in a GGUF file, after the architecture}
GGUF_NAMES = {'vocab_size': 'vocab_size', 'block_size': 'context_length',
              'n_layer': 'block_count', 'n_head': 'attention.head_count',
              'n_kv_head': 'attention.head_count_kv', 'n_embd': 'embedding_length',
              'n_hidden': 'feed_forward_length', 'rope_base': 'rope.freq_base',
              'norm_eps': 'attention.layer_norm_rms_epsilon'}
SCALES = 'model.layers.{}.self_attn.scale_param'  # head scales of a layer, in the paper's code
ROPE_TYPES = {'default': '', 'linear': 'pi', 'dynamic': 'dynamic_ntk', 'yarn': 'yarn',
              'llama3': 'llama3'}
LLAMA3 = {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LOCAL = {'local_files_only': True, 'trust_remote_code': False}
# What our model computes, where a config.json may ask for something else
FIXED = LLAMA3 | {
    'hidden_act': 'silu', 'embedding_multiplier': 1, 'residual_multiplier': 1, 'logits_scaling': 1,
    'partial_rotary_factor': 1, 'beta_fast': 32, 'beta_slow': 1, 'attention_factor': None}


# ---------------------------------------------------------------------- in: Llama and its kin

def tensor_names(c, kind):
    """{our weight: the names of its parts in a folder}. c: a ModelConfig; kind: a model_type."""
    embedding = 'model.embed_tokens.weight'
    names = {'embed.weight': [embedding], 'norm.weight': ['model.norm.weight'],
             'head.weight': [embedding if c.tied else 'lm_head.weight']}
    for i in range(c.n_layer):
        for ours, theirs in (GRANITE_PARTS if kind == GRANITE else PARTS).items():
            names[f'blocks.{i}.{ours}.weight'] = [f'model.layers.{i}.{part}.weight'
                                                  for part in theirs.split()]
    return names


def trained_position(config):
    """The position method of a Llama, SmolLM3 or Granite."""
    kind = 'nope' if config.model_type == GRANITE else 'rope'
    kind = getattr(config, 'position_embedding_type', None) or kind
    if kind not in ('none', 'nope', 'rope'):  # transformers would take it for NoPE
        raise ValueError(f'position_embedding_type {kind} is unknown')
    layers = getattr(config, 'no_rope_layers', [kind == 'rope'])
    names = ['rope' if has_rope else 'none' for has_rope in layers]
    period = next(n for n in range(1, len(names) + 1) if names[n:] == names[:-n])
    return ','.join(names[:period])


def read_ours(path, config, position):
    """
    Our weights and the ModelConfig of a Llama, SmolLM3 or Granite, or None if it computes what our
    model does not.
    """
    from safetensors.torch import load_file
    rope, D = config.rope_parameters, config.hidden_size // config.num_attention_heads
    entries, trained = config.to_dict() | rope, trained_position(config)
    scaling = ROPE_TYPES.get(rope['rope_type'])
    fixed = FIXED | {'head_dim': D, 'layer_types': ['full_attention'] * config.num_hidden_layers}
    odd = [name for name, value in fixed.items() if entries.get(name) not in (None, value)]
    if odd or scaling is None:
        return None

    tensors, weights = {}, {}  # memory-mapped
    for file in [*path.glob('model*.safetensors')] or path.glob('pytorch_model*.bin'):
        tensors |= (load_file(file) if file.suffix == '.safetensors' else
                    torch.load(file, 'cpu', weights_only=True, mmap=True))
    if SCALES.format(0) in tensors:  # only NoPE models have them
        trained = 'none'
    values = {ours: entries[theirs] for ours, theirs in NAMES.items()} | {
        'position': position or trained, 'rope_base': rope['rope_theta'],
        'rope_scaling': scaling and f"{scaling}:{rope['factor']}",
        'n_hidden': entries.get('shared_intermediate_size') or config.intermediate_size,
        'pretrained_length': entries.get('original_max_position_embeddings')}
    c = model_config(values | unused_settings(values))
    # Granite's attention is softmax(multiplier q.k).
    multiplier = getattr(config, 'attention_multiplier', D ** -0.5)
    uniform = torch.full((c.n_head,), multiplier * D ** 0.5)
    for i in range(c.n_layer):
        scale = tensors.pop(SCALES.format(i), uniform)       # (H,)
        weights[f'blocks.{i}.attn.head_scale'] = scale[:, None].clone()
    names = tensor_names(c, config.model_type)
    for name in tensors.keys() - sum(names.values(), ['lm_head.weight']):
        if not name.endswith('inv_freq'):  # biases, experts ...
            return None
    for ours, theirs in names.items():
        weights[ours] = torch.cat([tensors[name] for name in theirs])
    return weights, c


# ---------------------------------------------------------------------- in: GGUF

def pre_tokenizer(kind):
    """What cuts text into words before BPE, by the name that llama.cpp gives it."""
    from tokenizers import Regex, pre_tokenizers
    before = {'gpt-2': [], 'smollm': [pre_tokenizers.Digits(individual_digits=True)],
              'llama-bpe': [pre_tokenizers.Split(Regex(PATTERN), 'isolated')]}
    if kind not in before:
        raise ValueError(f'its tokenizer is of kind {kind}, not of {", ".join(before)}')
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != 'llama-bpe')
    return pre_tokenizers.Sequence([*before[kind], bytes_of])


def gguf_tokenizer(name, fields):
    """The state of the tokenizer that the fields of a GGUF file describe."""
    from gguf import TokenType
    from tokenizers import Tokenizer, decoders, models, processors
    found = {key.removeprefix('tokenizer.ggml.'): value for key, value in fields.items()}
    kind, tokens = found.get('pre', found['model']), found['tokens']
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(pair.split(' ')) for pair in found.get('merges', [])]
    merges = [pair for pair in pairs if ''.join(pair) in vocab]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind == 'llama-bpe'))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer(kind), decoders.ByteLevel()
    for token, its in zip(tokens, found['token_type']):
        if its == TokenType.CONTROL:
            tokenizer.add_special_tokens([token])
        elif its == TokenType.USER_DEFINED:
            tokenizer.add_tokens([token])
    if found.get('add_bos_token'):
        start = tokens[found['bos_token_id']]
        tokenizer.post_processor = processors.TemplateProcessing(
            f'{start} $A', special_tokens=[(start, vocab[start])])
    return tokenizer_state(HFTokenizer(name, tokenizer.to_str(), tokens[found['eos_token_id']]))


def read_gguf(path):
    """Our weights in float32, the ModelConfig and the tokenizer's state of a GGUF file."""
    import gguf
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields['general.architecture']
    if kind not in ('llama', 'granite'):
        raise ValueError(f'its architecture is {kind}, not llama or granite')
    own = {name.removeprefix(f'{kind}.'): value for name, value in fields.items()
           if name.startswith(f'{kind}.')}
    tensors = {tensor.name: torch.tensor(gguf.quants.dequantize(
        tensor.data, tensor.tensor_type)) for tensor in reader.tensors}
    values = {ours: own.pop(name) for ours, name in GGUF_NAMES.items()} | {
        'tied': 'output.weight' not in tensors,
        'position': 'rope' if own.pop('rope.scaling.finetuned', True) else 'none'}
    c = model_config(values | unused_settings(values))
    D = c.head_dim
    fixed = {'rope.dimension_count': D, 'attention.key_length': D, 'attention.value_length': D,
             'logit_scale': 1, 'residual_scale': 1, 'embedding_scale': 1}
    odd = [name for name, value in own.items() if value != fixed.get(name)]
    weights, their_names = {}, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.n_layer)
    for ours, names in tensor_names(c, 'llama').items():
        parts = []
        for name in names:
            part = tensors[their_names.get_name(name, ('.weight',))]
            if kind == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
                part = part.view(-1, D // 2, 2, c.n_embd).transpose(1, 2).reshape(part.shape)
            parts.append(part)
        weights[ours] = torch.cat(parts)
    known = sum(tensor_names(c, 'llama').values(), [])
    odd += tensors.keys() - {their_names.get_name(name, ('.weight',)) for name in known}
    if odd:
        raise ValueError(f'our model does not compute its {", ".join(odd)}')
    return weights, c, gguf_tokenizer(Path(path).name, fields)


# ---------------------------------------------------------------------- in: all other models

class Foreign(nn.Module):
    """A causal model that transformers runs, called like our Transformer."""

    def __init__(self, path, dtype):
        super().__init__()
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **LOCAL)
        c = self.model.config.get_text_config()
        L = getattr(c, 'max_position_embeddings', getattr(c, 'max_seq_len', 2048))
        if c.model_type == 'mpt':  # it makes its biases for so many tokens
            c.max_seq_len = 2 ** 17
        self.config = SimpleNamespace(
            vocab_size=c.vocab_size, block_size=L, pretrained_length=L, position=c.model_type,
            rope_scaling='', short_conv=0, dape_kernel=0, random_positions=0)
        arguments = inspect.signature(self.model.forward).parameters
        self.past = {'past_key_values', 'cache_params'} & arguments.keys()
        self.eval()
        with torch.no_grad():
            first = [self(torch.tensor([[0, later]]))[:, 0] for later in (0, 1)]
        if not torch.allclose(*first, rtol=1e-3, atol=1e-5):
            raise ValueError('it reads later tokens, so it is not causal')

    def forward(self, idx, targets=None, cache=None, tail=0):
        """Transformer.forward(), but the logits of all targets exist at the same time."""
        n, state = tail if targets is None else targets.shape[1], {'use_cache': False}
        if cache is not None:
            cache.length += idx.shape[1]
            state = {'use_cache': True} | dict.fromkeys(self.past, cache)
        logits = self.model(idx, logits_to_keep=n, **state).logits[:, -n:]
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction='none')
        return losses.view(targets.shape)

    def new_cache(self, max_length):
        """A cache of transformers, called like our KVCache. It grows, whatever max_length is."""
        from transformers import DynamicCache
        if not self.past:
            raise UserError(f'{self.config.position} has no cache, so it cannot generate text.')
        cache = DynamicCache(config=self.model.config)
        cache.device, cache.length = self.model.device, 0
        cache.repeat = cache.batch_repeat_interleave
        cache.reorder = lambda source, start: cache.reorder_cache(source)
        return cache

    def refuse(self, *_):
        raise UserError(f'transformers runs this {self.config.position}, so it can only be '
                        'evaluated and sampled from. Use a Llama, or a model of train.py.')

    blocks = head_scale = property(refuse)


def folder_of(source):
    """The folder of a source. From the hub only what we read is downloaded, once."""
    if not source.startswith('hf:'):
        return Path(source)
    from huggingface_hub import snapshot_download
    repo, _, revision = source[3:].partition('@')
    for patterns in ['*.json', 'model*.safetensors'], ['pytorch_model*.bin']:
        path = Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
        if any(path.glob('model*.safetensors')):
            break
    return path


def read(source, position=None, dtype=torch.float32):
    """
    A model of others, as read_checkpoint() returns one of ours. `model` is a state dict in our
    names, or a Foreign with weights of this dtype. position: the method that it was trained with;
    None: as its config.json says.
    """
    kind = tokenizer = None
    try:
        if source.endswith('.gguf'):
            weights, c, tokenizer = read_gguf(source)
            return {'model': weights, 'model_config': c, 'digest': weights_digest(weights),
                    'step': 0, 'settings': {}, 'tokenizer': tokenizer, 'path': source}
        from transformers import AutoConfig
        path = folder_of(source)
        kind = json.loads((path / 'config.json').read_text(encoding='utf-8')).get('model_type')
        config = AutoConfig.from_pretrained(path, **LOCAL)
        ours = kind in ('llama', 'smollm3', GRANITE) and read_ours(path, config, position)
        if not ours and position:
            raise ValueError('transformers runs it, with its own position method')
        model = Foreign(path, dtype) if not ours else ours[0]
    except Exception as error:  # those of transformers, the hub and safetensors share no class
        raise UserError(f'{source} (model_type {kind}) cannot be read: {error!r:.300} This takes a '
                        'Hugging Face folder or hf:ORG/NAME, and pip install ".[hf]".') from error
    if (path / 'tokenizer.json').is_file():
        tokenizer = tokenizer_state(get_tokenizer(str(path / 'tokenizer.json')))
    weights, c = ours or (model.state_dict(), model.config)
    return {'model': model, 'model_config': c, 'digest': weights_digest(weights), 'step': 0,
            'settings': {}, 'tokenizer': tokenizer, 'path': source}


# ---------------------------------------------------------------------- out: weights and settings

def require_exportable(model):
    """Refuse a model that no stock model can hold, because the folder would compute otherwise."""
    blocks, c = model.blocks, model.config
    names = *NAMES, 'position', 'pretrained_length', 'rope_base', 'rope_scaling'
    is_plain = c == ModelConfig(**{name: getattr(c, name) for name in names})
    if {type(block.attn.position) for block in blocks} - {NoPE, RoPE} or not is_plain:
        raise UserError('Only NoPE, RoPE and patterns of both can be written, without a window, '
                        'p-RoPE, random positions, DAPE or short convolutions.')
    if 'rope' in c.position and model.head_scale.dim() == 3:
        raise UserError('With RoPE a scale per channel cannot be written, because it acts after '
                        "RoPE's rotation and the weights of q come before it.")


@torch.no_grad()
def fold(model):
    """Make head scales a part of the rows of q, and head gains of the columns of out."""
    C, D = model.config.n_embd, model.config.head_dim
    for block in model.blocks:
        attention = block.attn
        scale, gain = attention.head_scale, attention.head_gain              # (H, 1) or (H, D)
        attention.qkv.weight[:C] *= scale.expand(-1, D).reshape(C, 1)
        attention.out.weight *= gain.expand(-1, D).flatten()
        scale.fill_(1)
        gain.fill_(1)


def their_weights(model, kind):
    """{name: float32 tensor} of a folder, from a model after fold(). kind: a model_type."""
    c, weights, theirs = model.config, model.state_dict(), {}
    kv = c.n_kv_head * c.head_dim
    for ours, names in tensor_names(c, kind).items():
        weight = weights.pop(ours)
        rows = [c.n_embd, kv, kv] if 'qkv' in ours else len(weight) // len(names)
        theirs |= zip(names, weight.split(rows))
    odd = [name for name in weights if not name.endswith(('head_scale', 'head_gain'))]
    if odd:
        raise UserError(f'No stock model has {odd[0]}, so the model cannot be written.')
    return theirs


def their_config(c, encoding):
    """The config.json of a model."""
    kind, architecture = {
        'none': (GRANITE, 'GraniteMoeHybridForCausalLM'), 'rope': ('llama', 'LlamaForCausalLM'),
    }.get(c.position, ('smollm3', 'SmolLM3ForCausalLM'))
    scaling, factor = split_scaling(c.rope_scaling)
    L, D, base, rope = c.pretrained_length, c.head_dim, c.rope_base, None
    original = {'original_max_position_embeddings': L}
    config = original | {theirs: getattr(c, ours) for ours, theirs in NAMES.items()} | {
        'model_type': kind, 'architectures': [architecture], 'dtype': dtype,
        'max_position_embeddings': max(c.block_size, target_length or 0, int(factor * L)),
        'bos_token_id': start_token(encoding), 'eos_token_id': encoding.eot_token,
        'pad_token_id': None}  # transformers never trains its row of the embedding
    if kind == GRANITE:
        return config | {
            'position_embedding_type': 'nope', 'shared_intermediate_size': c.n_hidden,
            'layer_types': ['attention'] * c.n_layer, 'num_local_experts': 0,
            'attention_multiplier': D ** -0.5,
            'mamba_n_heads': 1}  # no layer has it, but it must divide twice the width
    if kind == 'smollm3':
        config['no_rope_layers'] = [int(c.method_of(layer) == 'rope') for layer in range(c.n_layer)]
    if scaling == 'dynamic_ntk':
        config['max_position_embeddings'] = L  # which it takes for L
    if scaling == 'ntk':
        base *= factor ** (D / (D - 2))
    elif scaling:
        theirs = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
        own = {'yarn': original, 'llama3': original | LLAMA3}.get(scaling, {})
        rope = {'rope_type': theirs[scaling], 'factor': factor} | own
    # in their older form, because newer versions of transformers read it, too
    return config | {'rope_theta': base, 'rope_scaling': rope}


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


def write_hf(path, model, state):
    """A folder that AutoModelForCausalLM and AutoTokenizer of unmodified transformers load."""
    from safetensors.torch import save_file
    encoding = get_tokenizer(state)
    config = their_config(model.config, encoding)
    save_json(path / 'config.json', config)
    end = encoding.decode_bytes([encoding.eot_token]).decode()
    save_json(path / 'tokenizer_config.json', {
        'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': end, 'pad_token': end,
        'padding_side': 'left'})
    (path / 'tokenizer.json').write_text(tokenizer_json(state), encoding='utf-8')
    save_file({name: weight.to(DTYPES[dtype] if weight.dim() == 2 else torch.float32, copy=True)
               for name, weight in their_weights(model, config['model_type']).items()},
              path / 'model.safetensors', {'format': 'pt'})


def write_gguf(path, model, state):
    """A folder with model.gguf for llama.cpp, which calls NoPE granite and RoPE llama."""
    import gguf
    from tokenizers import Tokenizer
    c, encoding, text = model.config, get_tokenizer(state), tokenizer_json(state)
    # llama.cpp knows patterns that cut text into words by name. Any pattern suits single bytes.
    splitter = {'gpt2': 'gpt-2', 'bytes': 'gpt-2'}.get(state['name'])
    if json.dumps(PATTERN) in text:
        splitter = 'llama-bpe'
    kind = {'none': 'granite', 'rope': 'llama'}.get(c.position)
    if not kind or c.rope_scaling or not splitter:
        raise UserError(f"position {c.position} {c.rope_scaling} with tokenizer {state['name']}: "
                        "write --format=hf, and let llama.cpp's convert_hf_to_gguf.py read it.")
    vocab, merges = Tokenizer.from_str(text).get_vocab(), json.loads(text)['model']['merges']
    end, types = encoding.eot_token, [gguf.TokenType.NORMAL] * len(vocab)
    types[end] = gguf.TokenType.CONTROL
    entries = {
        'context_length': max(c.block_size, target_length or 0), 'embedding_length': c.n_embd,
        'block_count': c.n_layer, 'feed_forward_length': c.n_hidden, 'head_count': c.n_head,
        'head_count_kv': c.n_kv_head, 'layer_norm_rms_eps': c.norm_eps,
        'vocab_size': c.vocab_size, 'rope_dimension_count': c.head_dim,
        'rope_freq_base': c.rope_base, 'tokenizer_model': 'gpt2', 'tokenizer_pre': splitter,
        'token_list': sorted(vocab, key=vocab.get), 'token_types': types,
        # at least one; a merge of two end tokens never applies to text
        'token_merges': [' '.join(pair) for pair in merges] or [f'{EOT} {EOT}'],
        'bos_token_id': end, 'eos_token_id': end, 'add_bos_token': False}
    if kind == 'granite':  # without RoPE, if rope_scaling_finetuned is False
        entries |= {'rope_scaling_finetuned': False, 'attention_scale': c.head_dim ** -0.5,
                    'logit_scale': 1.0, 'residual_scale': 1.0, 'embedding_scale': 1.0}
    writer = gguf.GGUFWriter(path / 'model.gguf', kind)
    for name, value in entries.items():
        getattr(writer, f'add_{name}')(value)

    kinds = gguf.GGMLQuantizationType
    matrix = kinds[dtype.replace('float', 'F').upper()]  # F32, F16, BF16
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.n_layer)
    for name, weight in their_weights(model, 'llama').items():
        if kind == 'llama' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            # RoPE turns rows k and k + D/2 of a head; llama.cpp wants the two side by side.
            weight = weight.view(-1, 2, c.head_dim // 2, c.n_embd).transpose(1, 2).flatten(0, 2)
        its = matrix if weight.dim() == 2 else kinds.F32
        data = gguf.quants.quantize(weight.numpy(), its)
        writer.add_tensor(names.get_name(name, ('.weight',)), data, raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


RUN = {'hf': '''from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (one.from_pretrained('.') for one in (AutoModelForCausalLM, AutoTokenizer))
print(tokenizer.decode(model.generate(**tokenizer('def ', return_tensors='pt'))[0]))''',
       'gguf': '''from llama_cpp import Llama  # pip install llama-cpp-python
print(Llama('model.gguf', n_ctx=0)('def ', max_tokens=50)['choices'][0]['text'])'''}


def card(model, info):
    """The text of README.md."""
    c, (low, high) = model.config, model.head_scale.aminmax()
    return f'''---
pipeline_tag: text-generation
---
# {Path(folder).name}

A causal transformer with {model.n_params():,} parameters: {c.n_layer} layers, {c.n_head} heads,
width {c.n_embd}, {c.vocab_size} tokens. Its position method is
`{f'{c.position} {c.rope_scaling}'.strip()}`; `none` is NoPE, no position encoding. It was trained
on windows of {c.pretrained_length} tokens ({info['settings'].get('dataset', 'text not known')}).

The weights of q contain its softmax scales, {low:.3f} to {high:.3f}; 1 is as trained. Source:
{scale or 'the checkpoint'}{f', for texts of {target_length} tokens' if target_length else ''}.

```python
{RUN[format]}
```
'''


def main(given):
    path, write = Path(folder), {'hf': write_hf, 'gguf': write_gguf}.get(format)
    if not write or dtype not in DTYPES or any(path.glob('*')):
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
    path.mkdir(parents=True, exist_ok=True)
    text = card(model, info)
    fold(model)
    write(path, model, info['tokenizer'])
    (path / 'README.md').write_text(text, encoding='utf-8')
    print(f"{info['path']} is now {folder}, in {dtype}. Its README.md says how to run it.")


if __name__ == '__main__':
    main(configure(globals()))
