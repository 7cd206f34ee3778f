"""
Export a checkpoint for other engines. The softmax scales become part of the weights.

$ python export.py --folder=out/demo/hf                                       # as trained
$ python export.py --scale=out/demo/nope/scale_head_640.json --folder=out/demo/hf_640   # for 4L
$ python export.py --format=gguf --folder=out/demo/gguf                       # for llama.cpp

hf writes a folder for stock transformers and vLLM. NoPE becomes Granite (GraniteMoeHybrid with
attention in every layer and no position embedding). RoPE becomes Llama. A pattern such as rope,none
becomes SmolLM3. gguf writes a folder with model.gguf for llama.cpp, for NoPE or RoPE. Both folders
get a model card, README.md.
"""

import contextlib
import json
from pathlib import Path

from configurator import configure, settings
from lib.answers import optional, whole_folder, write_text
from lib.checkpoints import Run
from lib.devices import DTYPES
from lib.errors import UserError, fault_of
from lib.huggingface import (
    require_exportable,
    save_folder,
    their_config,
    their_state,
    tokenizer_json,
)
from lib.scales import read_scale_file
from lib.tokenizers import PATTERN, tokenizer_from_state
from position import parse_scaling

out_dir = 'out/demo/nope'  # the run to read
init_from = 'last'         # last or best (of out_dir), a checkpoint file, or hf:ORG/NAME
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
position: str | None = None       # position method, such as none; None: that of the checkpoint
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4
target_length: int | None = None  # tokens; if a scale file has several sets, export the one for it
format = 'hf'              # hf or gguf
folder: str | None = None  # the new folder to write; None: out_dir/hf or out_dir/gguf
dtype = 'bfloat16'         # dtype of the written matrices: bfloat16, float32, float16
ids_only = False           # gguf: leave the tokenizer out; the file then reads and writes only ids
license = 'unknown'        # license of the weights, by the hub's name; the training text limits it


def tuned_length(run):
    """
    The length in tokens that the scales are for, or 0 if it is unknown. If the scale file has
    several sets, the set for target_length replaces them in the model.
    """
    sets = run.model.scale_sets
    if sets:
        if target_length is None or not run.L <= target_length <= max(sets.sets):
            raise UserError(f'target_length is {target_length}, and {scale} has sets for '
                            f"{', '.join(map(str, sets.sets))} tokens. A folder can hold only one "
                            'set. Choose one of these lengths, or a length in between.')
        sets.use(target_length)
        sets.remove()
        return target_length
    if target_length is not None:
        raise UserError('target_length chooses one of several sets in a scale file, but '
                        f'--scale={scale} does not have several sets. Leave it out.')
    if isinstance(scale, str):
        return min(read_scale_file(scale, run.model, run.info)[1])  # its only set
    return 0


# ---------------------------------------------------------------------- GGUF

def interleaved(weight, n_head):
    """
    The rows of q or k, (n_head * D, C), in llama.cpp's order for RoPE. RoPE turns rows k and k +
    D/2 of a head together, and llama.cpp expects these two rows side by side.
    """
    halves = weight.view(n_head, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def add_tokenizer(writer, gguf, state, vocab_size):
    """
    Put a byte-level BPE into a GGUF file. Raises UserError if llama.cpp would split text into words
    by another pattern than the BPE.
    """
    encoding = tokenizer_from_state(state)
    splitter = {'gpt2': 'gpt-2', 'bytes': 'gpt-2'}.get(state['name'])  # any suits bytes
    if state['kind'] == 'tiktoken' and state['pattern'] == PATTERN:
        splitter = 'llama-bpe'
    if not splitter:
        raise UserError(f"tokenizer {state['name']} splits text into words by its own pattern. "
                        'llama.cpp may not have this pattern, and would then read other tokens. '
                        'Export with --ids_only=True, and encode the text outside llama.cpp.')
    bpe = json.loads(tokenizer_json(state))['model']
    tokens = [f'[unused{i}]' for i in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for text, i in bpe['vocab'].items():
        tokens[i], types[i] = text, gguf.TokenType.NORMAL
    end = encoding.eot_token
    tokens[end], types[end] = '<|endoftext|>', gguf.TokenType.CONTROL
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    # llama.cpp requires at least one merge. A merge of two end tokens never applies to text.
    merges = [' '.join(pair) for pair in bpe['merges']]
    writer.add_token_merges(merges or [f'{tokens[end]} {tokens[end]}'])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def save_gguf(path, model, tokenizer, dtype, length):
    """
    Write a GGUF file, with RoPE as llama and NoPE as granite. llama.cpp runs granite without RoPE
    if rope.scaling.finetuned is false. tokenizer: its state, or None for a file of only ids; dtype:
    of the matrices; length: the length in tokens that the scales are for.
    """
    gguf, c = optional('gguf'), model.config
    require_exportable(model)
    kind, factor = parse_scaling(c.rope_scaling)
    if ',' in c.position or kind == 'dynamic_ntk':
        raise UserError(f"position is '{c.position}' {c.rope_scaling}, but llama.cpp applies RoPE "
                        'in all layers or in none, and it has no dynamic NTK. Export with '
                        '--format=hf.')
    config = their_config(c, dtype, length)
    entries = {
        'context_length': config['max_position_embeddings'], 'embedding_length': c.n_embd,
        'block_count': c.n_layer, 'feed_forward_length': c.n_hidden, 'head_count': c.n_head,
        'head_count_kv': c.n_kv_head, 'layer_norm_rms_eps': c.norm_eps,
        'rope_dimension_count': c.head_dim, 'vocab_size': c.vocab_size}
    if c.position == 'none':
        architecture = 'granite'
        entries |= {'rope_scaling_finetuned': False, 'attention_scale': c.head_dim ** -0.5,
                    'logit_scale': 1.0, 'residual_scale': 1.0, 'embedding_scale': 1.0}
    else:
        architecture = 'llama'
        entries['rope_freq_base'] = config['rope_theta']
        if config['rope_scaling']:
            entries |= {
                'rope_scaling_type': gguf.RopeScalingType(config['rope_scaling']['rope_type']),
                'rope_scaling_factor': factor, 'rope_scaling_orig_ctx_len': c.trained_length}
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in entries.items():
        getattr(writer, f'add_{name}')(value)
    if tokenizer:
        add_tokenizer(writer, gguf, tokenizer, c.vocab_size)
    else:
        writer.add_tokenizer_model('none')

    kinds = gguf.GGMLQuantizationType
    matrices = kinds[config['dtype'].replace('float', 'F').upper()]  # F32, F16, BF16
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], c.n_layer)
    for name, weight in their_state(model, dtype, 'llama').items():
        if c.position == 'rope' and name.endswith(('q_proj.weight', 'k_proj.weight')):
            weight = interleaved(weight, c.n_head if 'q_proj' in name else c.n_kv_head)
        kind = matrices if weight.dim() == 2 else kinds.F32
        data = gguf.quants.quantize(weight.float().numpy(), kind)  # exact: already rounded
        writer.add_tensor(names.get_name(name, try_suffixes=('.weight',)), data, raw_dtype=kind)
    with contextlib.closing(writer):  # Windows cannot remove an open file
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


# ---------------------------------------------------------------------- the model card

HOW_TO_RUN = {
    'hf': '''from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
ids = tokenizer('def ', return_tensors='pt').input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))''',
    'gguf': '''from llama_cpp import Llama  # pip install llama-cpp-python
model = Llama({folder!r} + '/model.gguf', n_ctx={n_ctx})
print(model('def ', max_tokens=50)['choices'][0]['text'])'''}


def measured_losses(run):
    """
    Lines of a table: the losses that eval_ppl.py measured for this model with these scales. If the
    scale file has several sets, only the length of the exported set is shown.
    """
    lines = []
    for path in sorted(Path(out_dir).glob('eval_ppl*.json')):
        with fault_of(path, 'a result of eval_ppl.py', 'Remove it.'):
            result = json.loads(path.read_text(encoding='utf-8'))
            if result.get('identity') == run.identity:
                lines += [f"| {row['length']} | {row['loss']} ± {row['standard_error']} "
                          f"| {row.get('gain', '')} | {result['dataset']}, {result['split']} "
                          f"| {result['protocol']} |"
                          for row in result['rows']  # rows of far repeats have no length
                          if 'length' in row and target_length in (None, row['length'])]
    return '\n'.join(lines) or '| not measured | | | | |'


def model_card(run, length, target):
    """The text of README.md, made from the checkpoint's settings and the results in out_dir."""
    c, info, trained = run.model.config, run.info, run.info['settings']
    names = 'dataset', 'init_from', 'batch_size', 'learning_rate', 'weight_decay', 'seed'
    how = '\n'.join(f'| {name} | {trained[name]} |' for name in names if name in trained)
    low, high = run.model.head_scale.aminmax()
    position = f'{c.position} {c.rope_scaling}'.strip()
    tokenizer = info['tokenizer']['name'] if info['tokenizer'] else 'none came with it'
    code = HOW_TO_RUN[format].format(folder=target, n_ctx=max(c.block_size, length))
    return f'''---
license: {license}
pipeline_tag: text-generation
---

# {Path(target).name}

A causal transformer: {run.model.n_params():,} parameters, {c.n_layer} layers, {c.n_head} heads,
width {c.n_embd}, {c.vocab_size} tokens (tokenizer: {tokenizer}). Its position method is
`{position}`; `none` is NoPE, no position encoding. License of the weights: {license}.

## How it was trained

| setting | value |
|---|---|
| training length L | {c.trained_length} tokens |
| steps | {info['step'] or 'not known'} |
| best validation loss, nats per token | {info.get('best_val_loss', 'not known')} |
{how}

## Softmax scales

Between {low:.3f} and {high:.3f}; a scale of 1 is as trained. The weights of q contain the scales.
The scales come from `--scale={scale}` and are for passes of {length or 'any number of'} tokens. If
the scale file also has gains of heads and norms, the weights contain these gains, too.

## Measured losses

Gain: the loss when the model sees only the last L tokens, minus the loss when it sees all tokens.

| length in tokens | nats per token | gain past L | text | protocol |
|---|---|---|---|---|
{measured_losses(run)}

## How to run

```python
{code}
```
'''


def main():
    if dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}'. Choose {', '.join(DTYPES)}.")
    if format not in HOW_TO_RUN:
        raise UserError(f"format is '{format}'. Choose {', '.join(HOW_TO_RUN)}.")
    run = Run(settings(globals()) | {'device': 'cpu', 'dtype': 'float32'})
    length, target = tuned_length(run), folder or f'{out_dir}/{format}'
    tokenizer, precision = run.info['tokenizer'], DTYPES[dtype]
    with whole_folder(target) as part:
        if format == 'gguf':
            tokenizer = None if ids_only else tokenizer
            save_gguf(part / 'model.gguf', run.model, tokenizer, precision, length)
        else:
            save_folder(part, run.model, tokenizer, precision, length)
        write_text(part / 'README.md', model_card(run, length, target))
    print(f"{run.info['path']} ({run.model.n_params():,} parameters, "
          f'position={run.model.config.position}) is now {target}, in {dtype}. '
          f'{target}/README.md says how to run it.')


if __name__ == '__main__':
    configure(globals())
    main()
