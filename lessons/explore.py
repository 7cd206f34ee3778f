"""
Writes lessons/explore.html, a page on which the models themselves run: explore_template.html with
model.js, explore.js and the weights in it. The page needs neither network nor Python. The weights
have 8 bits, and each row of a matrix has one scale.

$ python -m lessons.explore                 # 10 s on one core
$ python -m lessons.explore --keep=True     # new scripts, but the weights and numbers of the page
$ python -m lessons.explore --models='["out/demo/nope/last.pt"]' --scales=[]
"""

import base64
import html
import itertools
import json
from pathlib import Path

import numpy as np
import torch

from configurator import configure
from lib.answers import progress_bar, read_json, write_text
from lib.checkpoints import load_model
from lib.devices import setup
from lib.errors import ROOT, UserError, fault_of
from lib.figures import NAMES
from lib.scales import read_scale_file
from lib.tokenizers import PATTERN, parse_ranks, tokenizer_from_state
from model import ModelConfig, fold_gain, matrices
from position import rope_frequencies

# what to show
models = ['lessons/models/none/last.pt', 'lessons/models/rope/last.pt',
          'lessons/models/conv/last.pt']
scales = ['lessons/models/none/scale_uniform.json', 'lessons/models/none/scale_head_1024.json',
          'lessons/models/conv/scale_head_1024.json']  # scale files of these models
text = 'lib/devices.py'        # opens the page; of these files, its losses are most like past_L's
prose = 'lessons/README.md'    # the example that is no code
page = 'lessons/explore.html'  # what is written
keep = False                   # True: keep what the page holds; renew the scripts and the markup

SHARPER = 1.5  # the factor on one head's scale in the map of heads
MOST_MB = 6    # size of the page
# Names of tune_scale's methods, and of data sets.
TITLES = {'uniform': 'one scale for all heads, tuned', 'head': 'tuned head scales'}
DATASETS = {'code': 'Python code'}
# Passwords to hide, each with another word that takes its place.
KEYS = [['river', 'tiger'], ['window', 'garden'], ['silver', 'castle'], ['yellow', 'coffee'],
        ['winter', 'planet']]


# ---------------------------------------------------------------------- weights and tokenizer

def in_8_bits(weight):
    """Round a matrix: int8 numbers, (rows, columns), and one float32 factor a row, (rows, 1)."""
    rows = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (weight / rows).round().to(torch.int8), rows


def round_weights(model):
    """Round the matrices and the embedding of a model as in_8_bits(). Returns what is packed."""
    packed, rounded = {}, matrices(model) | {'embed.weight': model.embed.weight}
    folded = {f'blocks.{layer}.attn.out.weight': block.attn.head_gain
              for layer, block in enumerate(model.blocks)}
    for name, p in model.named_parameters():
        if name.endswith(('head_scale', 'head_gain')):
            continue
        entry = {'shape': list(p.shape)}
        if name in rounded:
            weight = p.data
            if name in folded:  # the page has no gains, so the matrix takes them
                weight = fold_gain(weight, folded[name], model.config.head_dim)
            numbers, rows = in_8_bits(weight)
            p.data = numbers * rows
            entry |= {'numbers': in_base64(numbers), 'rows': in_base64(rows)}
        else:
            entry['numbers'] = in_base64(p.data.float())
        packed[name] = entry
    for gain in folded.values():
        gain.data.fill_(1)
    return packed


def in_base64(tensor):
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def require_supported(model, path):
    """Raise UserError unless model.js can compute this model."""
    c = model.config
    if not isinstance(c, ModelConfig):
        raise UserError(f'{path} is not a checkpoint of train.py. Give one that train.py wrote.')
    methods = {c.method_of(layer) for layer in range(c.n_layer)}
    odd = {name: getattr(c, name) for name in ('random_positions', 'dape_kernel', 'rope_window')
           if getattr(c, name)}
    if not methods <= {'none', 'rope'}:
        odd['position'] = c.position
    if c.rope_scaling.startswith('dynamic'):
        odd['rope_scaling'] = c.rope_scaling
    for name, value in odd.items():
        raise UserError(f"{path} has {name} '{value}'. The page computes position none and rope, "
                        'with any rope_scaling but dynamic_ntk. Give such a checkpoint.')
    if any(block.attn.head_scale.shape[1] > 1 for block in model.blocks):
        raise UserError(f'{path} has one scale per channel; the page has one per head. Give a '
                        'checkpoint without them.')


def rope_of(c):
    """For each layer, what RoPE turns by: frequencies and a factor; None for a NoPE layer."""
    D = c.head_dim
    frequency, factor = rope_frequencies(D, c.rope_base, c.rope_scaling, c.L0, 1)
    frequency[round(c.rope_share * (D // 2)):] = 0
    turned = {'frequency': frequency.float().tolist(), 'factor': factor}
    return [turned if c.method_of(layer) == 'rope' else None for layer in range(c.n_layer)]


def tokenizer_of(state, path):
    """A tokenizer as model.js takes it. Raises UserError for one that model.js does not have."""
    if state and state['kind'] == 'tiktoken' and (
            state['pattern'] == PATTERN or state['name'] == 'bytes'):
        ranks = parse_ranks(state['text'], path)
        if sorted(ranks.values()) == list(range(len(ranks))):
            tokens = sorted(ranks, key=ranks.get)
            return {'kind': 'bytes' if state['name'] == 'bytes' else 'bpe',
                    'ranks': [base64.b64encode(token).decode() for token in tokens],
                    'eot': state['eot_token']}
    raise UserError(f"{path} has tokenizer {state and state['name']}. The page can only have bytes "
                    'or a BPE with the pattern of lib/tokenizers.py. Give such models.')


# ---------------------------------------------------------------------- numbers of the first text

def losses_of(model, ids, cut=False):
    """
    The loss of each token of ids after the first, with everything before it, or with the context
    cut to L as model.js cuts it: a piece of L / 8 tokens reads the L tokens up to its end.
    """
    T, L = len(ids) - 1, model.config.block_size
    found = model(ids[None, :-1][:, :L if cut else T], ids[None, 1:][:, :L if cut else T])[0]
    piece = max(1, L // 8)
    for first in range(L, T if cut else 0, piece):
        end = min(first + piece, T)
        start = first + piece - L
        tail = model(ids[None, start:end], ids[None, first + 1:end + 1])[0]
        found = torch.cat((found, tail))
    return found


def head_gains(model, ids, update):
    """By how much the mean loss past L falls if one head is sharpened: a list, layer by layer."""
    own, L, gains = model.head_scale, model.config.block_size, []
    before = losses_of(model, ids)[L:].mean()
    for layer, head in itertools.product(*map(range, own.shape)):
        changed = own.clone()
        changed[layer, head] *= SHARPER
        model.head_scale = changed
        gains.append((before - losses_of(model, ids)[L:].mean()).item())
        update()
    model.head_scale = own
    return gains


def short(numbers, decimals=3):
    """Numbers of few decimals, because more would not change what the page shows."""
    return [round(float(x), decimals) for x in numbers]


def tuned_scales(model, info):
    """The scales of the files that were tuned for this model: {method: list}."""
    found = {}
    for file in scales:
        if json_of(file).get('weights_digest') != info['digest']:
            continue  # of another model
        data, sets = read_scale_file(file, model, info)
        vectors = sets[max(sets)]
        other = [name for name, x in vectors.items() if x.dim() > 1 and x.shape[1] > 1
                 or not name.endswith('head_scale') and (x != 1).any()]
        if other:
            raise UserError(f'{file} has {other[0]}; the page takes only one scale per head. Leave '
                            'the file out.')
        rows = [x for name, x in vectors.items() if name.endswith('head_scale')]
        if data['method'] in found:
            raise UserError(f"{file} is the second file of {model.config.position} with method "
                            f"{data['method']}. The page shows one: leave the other out.")
        found[data['method']] = short(torch.cat(rows)[:, 0], 4)
    return found


def text_of(path):
    if not Path(path).is_file():
        raise UserError(f'There is no {path}. Check the name.')
    with fault_of(path, 'text in UTF-8', 'Name another file.'):
        return Path(path).read_text(encoding='utf-8')


def json_of(path):
    content = text_of(path)
    with fault_of(path, 'a scale file', 'Make one with tune_scale.py, or leave it out.'):
        return dict(json.loads(content))


@torch.no_grad()
def packed_model(model, tuned, ids, update):
    """
    One model as the page takes it, with the numbers of the first text, which the page shows.
    tuned: of tuned_scales().
    """
    packed = {'tensors': round_weights(model), 'rope': rope_of(model.config)}
    own, c = model.head_scale, model.config
    name = NAMES.get(c.position, c.position) + (' + convolution' if c.short_conv else '')
    losses = {'own': short(losses_of(model, ids)), 'own cut': short(losses_of(model, ids, True))}
    gains = short(head_gains(model, ids, update))
    for method, numbers in tuned.items():
        model.head_scale = torch.tensor(numbers).view(own.shape)
        losses[method] = short(losses_of(model, ids))
    config = {name: value for name, value in vars(c).items() if isinstance(value, int | float)}
    return {'name': name, 'parameters': model.n_params(), 'packed': packed | {'config': config},
            'sets': {'own': own.flatten().tolist(), **tuned},
            'stored': {'losses': losses, 'heads': gains}}


# ---------------------------------------------------------------------- page

def contents():
    """Everything that the page stores. What the page says with numbers is made from this."""
    setup('cpu', 'float32', 1337)
    opened = [load_model(path, '', 'cpu') for path in models]
    model, info = opened[0]
    c = model.config
    state, L = tokenizer_of(info['tokenizer'], models[0]), c.block_size
    for (twin, its), path in zip(opened, models):
        require_supported(twin, path)
        if (twin.config.block_size, twin.head_scale.shape) != (L, model.head_scale.shape) or (
                tokenizer_of(its['tokenizer'], path) != state):
            raise UserError(f'{path} has another block_size, tokenizer or other heads than '
                            f'{models[0]}. Give models that share these.')
    known = {its['digest'] for _, its in opened}
    for file in scales:
        if json_of(file).get('weights_digest') not in known:
            raise UserError(f'{file} was tuned for none of these models. Leave it out.')
    tuned = [tuned_scales(*one) for one in opened]
    tokenizer = tokenizer_from_state(info['tokenizer'])
    ids = tokenizer.encode_ordinary(text_of(text))[:8 * L]
    if len(ids) < 8 * L:
        raise UserError(f'{text} has {len(ids)} tokens; give a text of at least {8 * L}, 8L.')
    ids = [state['eot'], *ids]
    bar = progress_bar(len(models) * model.head_scale.numel(), 'explore')
    found = [packed_model(twin, sets, torch.tensor(ids), lambda: bar.update(1))
             for (twin, _), sets in zip(opened, tuned)]
    dataset = info['settings'].get('dataset')
    return {'L': L, 'n_layer': c.n_layer, 'n_head': c.n_head, 'sharper': SHARPER,
            'trained_on': DATASETS.get(dataset, f'data set {dataset}'), 'tokenizer': state,
            'ids': ids, 'source': text, 'models': found, 'examples': examples(tokenizer, L)}


def examples(tokenizer, L):
    """Texts to choose from: [title, text]. The repeated paragraph returns after more than L."""
    ids = tokenizer.encode_ordinary(text_of(prose))
    paragraph = tokenizer.decode(ids[:3 * L // 2])
    return [['The first text (code)', None], ['Prose', tokenizer.decode(ids[:8 * L])],
            ['A repeated paragraph', '\n\n'.join([paragraph] * 6)]]


def titles(found):
    """Names of the sets of scales of all models, {method: title}. own: those of the checkpoint."""
    methods = [method for model in found['models'] for method in model['sets']]
    tuned = {method: TITLES.get(method, f'tuned: {method}') for method in methods}
    return tuned | {'own': 'as trained', 'mine': 'your own scales'}


def first_readings(found):
    """The readings of the first screen, by the first model: settings and losses of each."""
    L, model = found['L'], found['models'][0]
    sets, losses = model['sets'], model['stored']['losses']
    readings = [('As trained', 'as trained', sets['own'], False, losses['own'])]
    for method in list(sets)[1:][-1:]:
        readings.append((found['titles'][method].capitalize(), 'tuned', sets[method], False,
                         losses[method]))
    title = f'Looks back only {L - L // 8 + 1} to {L} tokens'
    readings.append((title, 'looks back L', sets['own'], True, losses['own cut']))
    return [{'title': title, 'short': label, 'losses': losses,
             'asked': {'model': 0, 'scales': scales, 'cut': is_cut}}
            for title, label, scales, is_cut, losses in readings]


# ---------------------------------------------------------------------- sentences

def sentences(found):
    """What the page says with numbers, {name in the template: HTML}."""
    L, first, n_head = found['L'], found['first'], found['n_head']
    panels = ''
    for one in first:
        title = html.escape(one['title'])
        says = (f'{np.mean(one["losses"][:L]):.2f} nats up to L, '
                f'{np.mean(one["losses"][L:]):.2f} past L')
        panels += (f'<figure><figcaption><b>{title}</b><br>{says}</figcaption><div class="tokens" '
                   f'tabindex="0" role="group" aria-label="{title}: {says}. Left and right move '
                   'through the tokens."></div></figure>\n')
    sizes = '; '.join(f"{html.escape(one['name'])}: {one['parameters']:,} parameters"
                      for one in found['models'])
    about = (f"The first text is the beginning of {html.escape(found['source'])} of this "
             f'project. {sizes}. Weights have 8 bits here. One model of each kind and one text: '
             'small differences mean nothing. Layers and heads are counted from 0.')
    names = [html.escape(one['name']) for one in found['models']]
    options = ''.join(f'<option value="{n}">{name}</option>' for n, name in enumerate(names))
    *rest, last = [f'<option value="{n}">{name}, as trained</option>'
                   for n, name in enumerate(names)]
    hiders = ''.join([*rest, last.replace('">', '" selected>')])
    presets = ''.join(f'<option value="{method}"></option>' for method in found['titles'])
    points = ''.join(f'<label>at {n}L <input type="range" min="0" max="9" step="0.1" '
                     f'data-from="{before * L}" data-to="{n * L}"></label>'
                     for before, n in itertools.pairwise((0, 1, 2, 3, 4, 6, 8)))
    distances = ''.join(f'<option value="{n * L // 4}">{n * L // 4} tokens = {n / 4:g}L</option>'
                        for n in (1, 2, 4, 8, 16, 28))
    texts = ''.join(f'<option value="{n}">{html.escape(title)}</option>'
                    for n, (title, _) in enumerate(found['examples']))
    heads = '<span></span>' + ''.join(f'<span>{n}</span>' for n in range(n_head))
    for layer in range(found['n_layer']):
        heads += f'<span>{layer}</span>' + '<button type="button"></button>' * n_head
    gains = found['models'][0]['stored']['heads']
    best = int(np.argmax(gains))
    return {'MODELS_OF_THE_PAGE': options, 'DISTANCES_OF_THE_PAGE': distances,
            'HEADS_OF_THE_PAGE': heads, 'COLUMNS_OF_THE_PAGE': str(n_head),
            'HIDERS_OF_THE_PAGE': hiders, 'PRESETS_OF_THE_PAGE': presets,
            'POINTS_OF_THE_PAGE': points, 'EXAMPLES_OF_THE_PAGE': texts,
            'BEST_HEAD_OF_THE_PAGE': f'layer {best // n_head}, head {best % n_head}',
            'POINT_OF_THE_PAGE': point(found), 'PANELS_OF_THE_PAGE': panels,
            'ABOUT_THE_PAGE': about, 'STUDY_OF_THE_PAGE': study(),
            'PICTURE_OF_THE_PAGE': picture(found), 'TEXT_OF_THE_PAGE': colored_text(found)}


def point(found):
    """The first paragraph."""
    L, first, model = found['L'], found['first'], found['models'][0]
    up_to_L = np.mean(first[0]['losses'][:L])
    past = [np.mean(one['losses'][L:]) for one in first]
    worse = ['worse' if loss > past[-1] else 'better' for loss in past]
    said = (f"This small model ({model['parameters'] / 1e6:.1f} million parameters, trained on "
            f"{found['trained_on']}) only ever saw texts of L = {L} tokens. Here it reads {8 * L}. "
            f'The redder a token, the worse it was predicted. The text itself is '
            f"{'harder' if past[-1] > up_to_L else 'easier'} past token {L}: even if the model may "
            f'look back only about {L} tokens, its loss there is {past[-1]:.2f} nats; up to token '
            f'{L} it is {up_to_L:.2f}. If it looks at everything, it is {worse[0]}: '
            f'{past[0]:.2f}.')
    if len(first) > 2:
        said += (f' With other softmax scales, tuned for long texts, it is {past[1]:.2f}, which is '
                 f'still {worse[1]} than looking back only {L} tokens.')
    return said + ' Point at any token.'


def study():
    """What results/past_L measured at 8L, compared with looking back only L tokens: table rows."""
    rows = read_json(ROOT / 'results/past_L/past_L.json', 'past_L')['rows']
    models = {'none': 'NoPE', 'conv': 'NoPE + convolution'}
    scales = {'untuned': 'as trained', 'head': 'tuned head scales'}
    said = ''
    for row in sorted(rows, key=lambda row: row['model'], reverse=True):
        if row['reading'] in scales and row['model'] in models:
            n = len(row['seeds'])
            said += f"<tr><td>{models[row['model']]}, {scales[row['reading']]} ({n} seeds)</td>"
            for gain in row['gain at 1024']['mean'], row['gain, all']['mean']:
                said += f"<td>{'worse' if gain < 0 else 'better'} by {abs(gain):.2f}</td>"
            said += '</tr>\n'
    return said


def page_of(found):
    """The page as text: the template with the scripts and the JSON in it. No tag can end there."""
    folder = Path(__file__).parent
    found = found | {'titles': titles(found), 'keys': KEYS}
    found |= {'first': first_readings(found)}
    filled = (folder / 'explore_template.html').read_text(encoding='utf-8')
    code = {'MODEL_OF_THE_PAGE': 'model.js', 'SCRIPT_OF_THE_PAGE': 'explore.js'}
    parts = sentences(found)
    parts |= {name: (folder / file).read_text(encoding='utf-8') for name, file in code.items()}
    parts['DATA_OF_THE_PAGE'] = json.dumps(found, separators=(',', ':')).replace('<', '\\u003c')
    for name, part in parts.items():
        filled = filled.replace(name, part)
    return filled


def picture(found):
    """Loss by position of the readings of the first screen, as SVG. It needs no JavaScript."""
    L, top, parts = found['L'], 8, ''
    styles = {'as trained': 'stroke: var(--before)" stroke-dasharray="9 5',
              'tuned': 'stroke: var(--mine)',
              'looks back L': 'stroke: var(--cut)" stroke-dasharray="12 4 3 4'}
    for tick in range(0, top + 1, 2):
        y = 200 - 180 * tick / top
        parts += f'<path class="axis" d="M40 {y:g}H600"/><text x="20" y="{y + 6:g}">{tick}</text>'
    for n in 1, 2, 4, 6, 8:
        parts += f'<text x="{32 + 70 * n}" y="222">{n if n > 1 else ""}L</text>'
    for n, one in enumerate(found['first']):
        losses = np.array(one['losses'])
        means = losses[:len(losses) // (L // 2) * (L // 2)].reshape(-1, L // 2).mean(1)
        points = ' '.join(f'{40 + 560 * (k + .5) / len(means):.0f},'
                          f'{200 - 180 * min(x, top) / top:.0f}' for k, x in enumerate(means))
        style = f'fill="none" stroke-width="3" style="{styles[one["short"]]}"'
        parts += (f'<polyline points="{points}" {style}/>'
                  f'<path d="M{40 + 190 * n} 272h36" {style}/>'
                  f'<text x="{82 + 190 * n}" y="278">{html.escape(one["short"])}</text>')
    edge = 40 + 560 // 8
    return (f'<svg class="overview" viewBox="0 -8 620 292" role="img" aria-label="{trend(found)}">'
            f'<path class="edge" d="M{edge} 20V200"/><text x="40" y="8">loss in nats</text>'
            f'<text x="240" y="244">position in tokens</text>{parts}</svg>')


def trend(found):
    """What the picture shows, in words."""
    L, first = found['L'], found['first']
    rising = [one['short'] for one in first
              if np.mean(one['losses'][L:2 * L]) > np.mean(one['losses'][:L])]
    who = 'all' if len(rising) == len(first) else ', '.join(rising) or 'none'
    last = sorted(first, key=lambda one: -np.mean(one['losses'][-L:]))
    order = ', '.join(f"{one['short']} {np.mean(one['losses'][-L:]):.2f}" for one in last)
    return html.escape(f'Loss by position. Just past L, it rises for: {who}. At the end, from '
                       f'highest to lowest: {order} nats.')


def colored_text(found):
    """The first text, colored by the losses of the first reading, for readers without scripts."""
    tokens = [base64.b64decode(token) for token in found['tokenizer']['ranks']]
    spans = ''
    for token, loss in zip(found['ids'][1:], found['first'][0]['losses']):
        shown = tokens[token].decode(errors='replace').replace('\n', '⏎\n')
        spans += f'<span style="--loss:{loss:.1f}">{html.escape(shown)}</span>'
    return spans


def data_of(path):
    """What a page holds, as contents() returned it."""
    content = text_of(path)
    with fault_of(path, 'a page of this stage', 'Make it without --keep.'):
        return json.loads(content.split('id="data">')[1].split('</script>')[0])


def main():
    if not models:
        raise UserError('models is empty; give at least one checkpoint.')
    result = page_of(data_of(page) if keep else contents())
    size = len(result.encode()) / 1e6
    if size > MOST_MB:
        raise UserError(f'the page would have {size:.1f} MB; at most {MOST_MB} are sensible. Give '
                        'fewer or smaller models.')
    write_text(page, result)
    print(f'wrote {page}, {size:.2f} MB')


if __name__ == '__main__':
    configure(globals())
    main()
