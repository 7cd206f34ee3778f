"""
Writes lessons/explore.html, a page on which the models themselves run: explore_template.html with
model.js, explore.js and the weights in it. The page needs neither network nor Python. The matrices
have 8 bits, and each row of a matrix has one scale.

$ python -m lessons.explore                 # 10 s on one core
$ python -m lessons.explore "--models=['out/demo/nope']" --page=out/explore.html
"""

import base64
import json
from pathlib import Path

from configurator import ROOT, UserError, configure

import torch

from common import setup
from position import NoPE, RoPE, rope_frequencies
from stage import cut_windows, matrices, open_model
from tokenizer import PATTERN, get_tokenizer

# what to show
models: list[str] = ['lessons/models/none', 'lessons/models/rope', 'lessons/models/conv']
scales: list[str] = ['lessons/models/none/scale_uniform_1024.json',  # scale files of these models
                     'lessons/models/none/scale_head_1024.json',
                     'lessons/models/conv/scale_head_1024.json']
text = 'common.py'             # opens the page
prose = 'lessons/README.md'    # the example that is no code
page = 'lessons/explore.html'  # what is written

SHARPER = 1.5  # the factor on one head's scale in the map of heads


# ---------------------------------------------------------------------- weights and tokenizer

def in_base64(tensor):
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def pack_weights(model):
    """
    {name: the tensor as model.js takes it}. Matrices and the embedding are rounded to int8 numbers,
    times one float32 factor for each row; in the model, too.
    """
    tensors = {}
    for name, p in model.named_parameters():
        if name.endswith(('head_scale', 'head_gain')):
            continue
        tensors[name] = {'shape': [*p.shape], 'numbers': in_base64(p)}
        if name in matrices(model) or name == 'embed.weight':
            rows = p.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            numbers = (p / rows).round().to(torch.int8)
            tensors[name] |= {'numbers': in_base64(numbers), 'rows': in_base64(rows)}
            p.data = numbers * rows
    return tensors


def rope_of(model, path):
    """
    What RoPE rotates by in each layer: frequencies and a factor; None in a layer of NoPE. Raises
    UserError if model.js cannot compute the model.
    """
    layers = []
    for block in model.blocks:
        method = block.attn.position
        if (type(method) not in (NoPE, RoPE) or method.dape or method.depends_on_length
                or block.attn.head_scale.shape[1] > 1 or (block.attn.head_gain != 1).any()):
            raise UserError(f'{path} is not for the page, which has NoPE and RoPE, one scale a '
                            'head, but no DAPE, window or dynamic_ntk.')
        if isinstance(method, RoPE):
            frequency, factor = rope_frequencies(method.D, method.base, method.scaling, method.L,
                                                 total=0)
            layers.append({'frequency': frequency.float().tolist(), 'factor': factor})
        else:
            layers.append(None)
    return layers


def tokenizer_of(state):
    """A tokenizer as model.js takes it."""
    kind = {r'[\s\S]{1,64}': 'bytes', PATTERN: 'bpe'}.get(state.get('pattern'))
    if not kind:
        raise UserError('The page has only bytes, or a BPE with the pattern of tokenizer.py, not '
                        f"the tokenizer {state['name']}.")
    return {'kind': kind, 'eot': state['eot_token'],
            'ranks': [line.split()[0] for line in state['text'].splitlines()]}


# ---------------------------------------------------------------------- numbers of the first text

def losses_of(model, ids, cut=False):
    """
    The loss of each of 8L tokens after the first, with everything before it, or with the context
    cut to L as model.js cuts it: a piece of L / 8 tokens reads the L tokens up to its end.
    """
    T, L = len(ids) - 1, model.config.block_size
    windows = [(0, T, T)]
    if cut:
        windows = [(0, L, L), *reversed(cut_windows(0, T, T - L, L))]
    return torch.cat([model(ids[None, lo:hi], ids[None, hi - n + 1:hi + 1])[0]
                      for lo, hi, n in windows])


def head_gains(model, ids):
    """By how much the mean loss past L falls if one head is sharpened, layer by layer."""
    own, L, gains = model.head_scale, model.config.block_size, []
    before = losses_of(model, ids)[L:].mean()
    for n in range(own.numel()):
        changed = own.clone()
        changed.view(-1)[n] *= SHARPER
        model.head_scale = changed
        gains.append(before - losses_of(model, ids)[L:].mean())
    model.head_scale = own
    return gains


def short(numbers):
    """Numbers of few digits, because more would not change what the page shows."""
    return [round(float(number), 4) for number in numbers]


@torch.no_grad()
def model_of(model, info, ids):
    """
    One model as the page takes it, its scales and those that were tuned for it, and the numbers of
    the first text that the page shows at once.
    """
    c, rope, tensors = model.config, rope_of(model, info['path']), pack_weights(model)
    sets = {'own': short(model.head_scale.flatten())}
    losses = {'own': short(losses_of(model, ids)), 'own cut': short(losses_of(model, ids, True))}
    heads = short(head_gains(model, ids))
    for file in scales:
        data = json.loads(Path(file).read_text(encoding='utf-8'))
        if data['weights_digest'] == info['digest']:
            model.head_scale = data['head_scale']
            sets[data['method']] = short(model.head_scale.flatten())
            losses[data['method']] = short(losses_of(model, ids))
    return {'position': c.position, 'parameters': model.n_params(), 'sets': sets,
            'packed': {'config': vars(c), 'rope': rope, 'tensors': tensors},
            'stored': {'losses': losses, 'heads': heads}}


# ---------------------------------------------------------------------- page

def page_of(data):
    """
    The page as text. All that it shows of `data` is put there by explore.js as text, never as HTML.
    It loads nothing.
    """
    parts = {name: (ROOT / 'lessons' / name).read_text(encoding='utf-8')
             for name in ('explore_template.html', 'model.js', 'explore.js')}
    parts['DATA'] = json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')
    filled = parts.pop('explore_template.html')
    for name, part in parts.items():
        filled = filled.replace(f'[[{name}]]', part)
    return filled


def main():
    opened = [open_model(path, '', setup('cpu', 'float32')) for path in models]
    shared = [(model.config.block_size, model.head_scale.shape, tokenizer_of(info['tokenizer']))
              for model, info in opened]
    if any(one != shared[0] for one in shared):
        raise UserError('Models of one page share L, the number of heads and the tokenizer.')
    L, _, tokenizer = shared[0]
    info = opened[0][1]
    ids = get_tokenizer(info['tokenizer']).encode_ordinary(Path(text).read_text(encoding='utf-8'))
    ids = [tokenizer['eot'], *ids[:8 * L]]
    if len(ids) <= 8 * L:
        raise UserError(f'{text} has {len(ids)} tokens. Give a --text= of 8L = {8 * L}.')
    data = {'L': L, 'sharper': SHARPER, 'dataset': info['settings'].get('dataset'),
            'tokenizer': tokenizer, 'ids': ids, 'source': text,
            'prose': Path(prose).read_text(encoding='utf-8'),
            'models': [model_of(*one, torch.tensor(ids)) for one in opened]}
    Path(page).write_text(page_of(data), encoding='utf-8')
    print(f'wrote {page}')


if __name__ == '__main__':
    configure(globals())
    main()
