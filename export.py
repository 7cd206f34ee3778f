"""
Export a checkpoint for other engines. The softmax scales become part of the weights.

$ python export.py --folder=out/demo/hf                                       # as trained
$ python export.py --scale=out/demo/nope/scale_head_640.json --folder=out/demo/hf_640   # for 5L
$ python export.py --format=gguf --folder=out/demo/gguf                       # for llama.cpp

hf writes a folder for stock transformers and vLLM. NoPE becomes Granite (GraniteMoeHybrid with
attention in every layer and no position embedding). RoPE becomes Llama. A pattern such as rope,none
becomes SmolLM3. gguf writes a folder with model.gguf for llama.cpp, for NoPE or RoPE. Both folders
get a model card, README.md.
"""

import json
import math
from pathlib import Path

from configurator import configure, settings
from lib.answers import optional, whole_folder, write_text
from lib.checkpoints import Run
from lib.devices import DTYPES
from lib.errors import UserError, fault_of
from lib.exports import save_folder, save_gguf
from lib.scales import put_vectors, read_scale_file, remove_scales

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
# what to write
target_length: int | None = None  # tokens; if a scale file has several sets, export the one for it
format = 'hf'                # hf or gguf
folder: str | None = None    # the new folder to write; None: out_dir/hf or out_dir/gguf
dtype = 'bfloat16'           # dtype of the written matrices: bfloat16, float32, float16
ids_only = False             # gguf: leave the tokenizer out; the file then has only token ids
license = 'unknown'          # the hub's name of the weights' license; the training text limits it


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
        remove_scales(run.model)
        put_vectors(run.model, sets.vectors_at(target_length))
        return target_length
    if target_length is not None:
        raise UserError('target_length chooses one of several sets in a scale file, but '
                        f'--scale={scale} does not have several sets. Leave it out.')
    if isinstance(scale, str):
        return min(read_scale_file(scale, run.model, run.info)[1])  # its only set
    return 0


# ---------------------------------------------------------------------- the model card

FORMATS = 'hf', 'gguf'
# The text of README.md, a template of Jinja. {{ card_data }} is the front matter, which the hub
# reads.
CARD = '''---
{{ card_data }}
---

# {{ name }}

A causal transformer: {{ '{:,}'.format(n_params) }} parameters, {{ c.n_layer }} layers,
{{ c.n_head }} heads, width {{ c.n_embd }}, {{ c.vocab_size }} tokens (tokenizer:
{{ info.tokenizer.name or 'none came with it' }}). Its position method is
`{{ (c.position ~ ' ' ~ c.rope_scaling).strip() }}`; `none` is NoPE, no position encoding.
License of the weights: {{ license }}.

## How it was trained

| setting | value |
|---|---|
| training length L | {{ c.L0 }} tokens |
| steps | {{ info.step or 'not known' }} |
| best validation loss, nats per token | {{ best_val_loss }} |
{%- for name in ('dataset', 'init_from', 'batch_size', 'learning_rate', 'weight_decay', 'seed')
    if name in info.settings %}
| {{ name }} | {{ info.settings[name] }} |
{%- endfor %}

## Softmax scales

{%- if scale is none and low == high == 1 %}

All are 1: this export adds no scales to the weights.
{%- else %}

Between {{ '%.3f' % low }} and {{ '%.3f' % high }}; a scale of 1 is as trained. The weights of q
contain the scales. The scales come from {{ '`--scale=%s`' % scale if scale else 'the checkpoint' }}
and are for passes of {{ length or 'any number of' }} tokens. If the scale file also has gains of
heads and norms, the weights contain these gains, too.
{%- endif %}

## Measured losses

Gain: the loss when the model sees only the last L tokens, minus the loss when it sees all tokens.

| length in tokens | nats per token | gain past L | text | protocol |
|---|---|---|---|---|
{{ losses or '| not measured | | | | |' }}

## How to run

```python
{% if format == 'gguf' -%}
from llama_cpp import Llama  # pip install llama-cpp-python
model = Llama({{ folder }} + '/model.gguf', n_ctx={{ [c.block_size, length] | max }})
{% if ids_only -%}
new_ids = model.generate([1, 2, 3], temp=0.0)  # ids of a prompt; yields one id after the other
print([id for id, _ in zip(new_ids, range(50))])
{%- else -%}
print(model('def ', max_tokens=50)['choices'][0]['text'])
{%- endif %}
{%- else -%}
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({{ folder }})
tokenizer = AutoTokenizer.from_pretrained({{ folder }})
ids = tokenizer('def ', return_tensors='pt').input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
{%- endif %}
```
'''


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
    return '\n'.join(lines)


def model_card(run, length, target):
    """The text of README.md, made from the checkpoint's settings and the results in out_dir."""
    hub = optional('huggingface_hub')
    data = hub.ModelCardData(license=license, pipeline_tag='text-generation')
    low, high = run.model.head_scale.aminmax()
    best = run.info.get('best_val_loss') or math.inf  # inf before the first validation
    card = hub.ModelCard.from_template(
        data, template_str=CARD, name=Path(target).name, folder=repr(target), format=format,
        ids_only=ids_only, c=run.model.config, n_params=run.model.n_params(), info=run.info,
        scale=scale, low=low, high=high, length=length, losses=measured_losses(run),
        best_val_loss=best if math.isfinite(best) else 'not known')
    return f'{card}\n'


def main():
    if dtype not in DTYPES:
        raise UserError(f"dtype is '{dtype}'. Choose {', '.join(DTYPES)}.")
    if format not in FORMATS:
        raise UserError(f"format is '{format}'. Choose {', '.join(FORMATS)}.")
    if ids_only and format == 'hf':
        raise UserError('ids_only is for --format=gguf. Leave it out.')
    run = Run(settings(globals()) | {'device': 'cpu', 'dtype': 'float32'})
    if run.runtime.world_size > 1:
        raise UserError('export.py runs in one process. Start it without torchrun.')
    _ = run.model.head_scale  # a model of the package transformers has none, and raises UserError
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
