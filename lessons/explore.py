"""
Writes lessons/explore.html, a page to play with: loss, attention entropy and attention by distance
of a model and its RoPE twin, as sliders change the context length and the softmax scales. The
page needs neither network nor Python: what was measured is inside.

$ python -m lessons.explore --models='["out/demo/nope/last.pt", "out/demo/rope/last.pt"]'
$ python -m lessons.explore --data=out/explore.json    # the page again, from what was measured
"""

import itertools
import json
from pathlib import Path

import numpy as np
import torch

import kernels
from configurator import between, configure, settings
from lib.answers import bin_means, json_value, progress_bar, read_json, save_json, write_text
from lib.checkpoints import load_model, open_windows
from lib.devices import setup
from lib.errors import UserError
from lib.figures import NAMES

# which model, which text, which device: the same lines in every stage
dataset: str | None = None   # a folder of data/; None: the text that the model was trained on
split = 'test'               # split of the dataset to read
# what to show
models = ['out/demo/nope/last.pt', 'out/demo/rope/last.pt']  # a model and its twin
data: str | None = None        # make the page from this JSON, and measure nothing
page = 'lessons/explore.html'  # what is written
out = 'out/explore.json'       # what was measured, for --data
uniform = [0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4]  # softmax scales of all heads
one_head = [0.5, 1.0, 1.5, 2.0, 3.0]  # of one head, the others staying at 1
n_samples = 8                  # windows of 8L tokens, evenly spaced over the split

QUERIES = 32  # of the second half of a context, evenly spaced, give its attention by distance


def shares_by_distance(attention, q, k, place, lengths):
    """
    What share queries give to keys at distances i - j of 0, 1, 2-3, 4-7 ... tokens, a mean over the
    windows and over queries of the second half of a context, for each of `lengths` (tokens):
    (H, lengths, bins). q: (B, H, T, D) scaled queries; k: (B, n_kv_head, T, D).
    """
    T, shares = q.shape[2], []
    edges = torch.tensor([0, *(2 ** n for n in range((T - 1).bit_length()))])
    for length in lengths:
        rows = torch.arange(length // 2, length, max(1, length // 2 // QUERIES))
        i, j = place.i[rows], place.j[:length]
        method = attention.position
        weights = method.softmax(method.scores(q[:, :, rows], k[:, :, :length], i, j))
        bins = torch.bucketize(rows[:, None] - torch.arange(length), edges, right=True) - 1
        # Later keys have no attention: their bin, -1, may be any.
        in_bin = torch.stack([weights.mean(0)[:, bins == n].sum(-1) for n in range(len(edges))], 1)
        shares.append(in_bin / len(rows))
    return torch.stack(shares, 1)


def measure(model, samples, width, lengths, layers):
    """
    Means over windows, samples: (B, T + 1) ids: loss (bins,) and entropy (layers, H, bins) in nats,
    in bins of `width` positions, and shares_by_distance() (layers, H, lengths, bins), of `layers`.
    """
    shares = []

    def look(layer, attention, q, k, place):
        if layer not in layers:
            return torch.zeros(q.shape[0], 1, q.shape[2])
        shares.append(shares_by_distance(attention, q, k, place, lengths))
        return kernels.attention_entropy(layer, attention, q, k, place)

    with model.probe(look) as entropy:
        losses = model(samples[:, :-1], samples[:, 1:])
    means = [entropy[layer].mean(0) for layer in layers]
    return {'loss': bin_means(losses.mean(0), width)[1],
            'entropy': bin_means(torch.stack(means), width)[1],
            'distance': torch.stack(shares).numpy()}


def rounded(value):
    """Numbers of three digits, as more would make the page larger and the curves no other."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f'{value:.3g}') if isinstance(value, float) else value


@torch.no_grad()
def measure_all(model, samples, width, lengths, uniform, one_head, update=lambda: None):
    """
    measure() for each scale of all heads, a list, and of each head alone, [layer][head][scale],
    where entropy (bins,) and distance (lengths, bins) are those of that head. Both have scale 1.
    """
    n_layer, H = model.head_scale.shape
    own = model.head_scale.numpy()
    result = {'uniform': [], 'head': [[[] for _ in range(H)] for _ in range(n_layer)]}
    for scale in uniform:
        model.head_scale = own * scale
        result['uniform'].append(measure(model, samples, width, lengths, range(n_layer)))
        update()
    unchanged = result['uniform'][uniform.index(1)]
    for layer, head, scale in itertools.product(range(n_layer), range(H), one_head):
        found, at = unchanged, layer
        if scale != 1:
            scales = own.copy()
            scales[layer, head] *= scale
            model.head_scale = scales
            found, at = measure(model, samples, width, lengths, [layer]), 0
        of_head = {key: found[key][at, head] for key in ('entropy', 'distance')}
        result['head'][layer][head].append({'loss': found['loss'], **of_head})
        update()
    model.head_scale = own
    return rounded(json_value(result))


def measured():
    """What the page shows, for JSON."""
    runtime = setup('cpu', 'float32', 1337)
    opened = [load_model(path, '', 'cpu') for path in models]
    model, info = opened[0]
    L, shape = model.config.block_size, model.head_scale.shape
    for twin, its in opened:
        if twin.config.block_size != L or twin.head_scale.shape != shape:
            raise UserError(f"{its['path']} has another block_size or other heads than "
                            f"{info['path']}. Give a model and its twin.")
    between({'block_size': L}, 16, 'block_size')
    windows = [open_windows(its, dataset or info['settings']['dataset'], split, 8 * L)
               for _, its in opened][0]
    samples = torch.from_numpy(windows.evenly_spaced(n_samples))
    lengths, width = [L // 2, L, 2 * L, 4 * L, 8 * L], L // 8
    positions, _ = bin_means(np.zeros(8 * L), width)
    n_passes = len(opened) * (len(uniform) + len(one_head) * shape.numel())
    bar, found = progress_bar(n_passes, 'explore', runtime.is_main), []
    for model, its in opened:
        name = model.config.position
        found.append({
            'name': NAMES.get(name, name), 'steps': its['step'], 'weights_digest': its['digest'],
            'parameters': model.n_params(),
            **measure_all(model, samples, width, lengths, uniform, one_head,
                          lambda: bar.update(1))})
    return {'stage': 'explore', 'dataset': windows.dataset, 'split': split,
            'tokenizer': windows.tokenizer_state['name'], 'n_windows': len(samples),
            'queries': QUERIES, 'block_size': L, 'width': width,
            'position': positions.tolist(), 'lengths': lengths, 'uniform': uniform,
            'one_head': one_head, 'models': found}


def page_of(found):
    """The page as text: the template with the JSON in it, in which no tag can end."""
    template = Path(__file__).with_name('explore_template.html').read_text(encoding='utf-8')
    text = json.dumps(found, separators=(',', ':')).replace('</', '<\\/')
    return template.replace('DATA_OF_THE_PAGE', text)


def main():
    between(globals(), 1, 'n_samples')
    for name, scales in {'uniform': uniform, 'one_head': one_head}.items():
        if 1 not in scales or sorted(set(scales)) != scales or scales[0] <= 0:
            raise UserError(f'{name} is {scales}; it must be scales above 0 in rising order, 1 '
                            'among them.')
    found = read_json(data, 'explore') if data else measured()
    if not data:
        save_json(out, found | {'settings': settings(globals())})
    text = page_of(found)
    write_text(page, text)
    print(f'wrote {page}, {len(text) / 1e6:.2f} MB')


if __name__ == '__main__':
    configure(globals())
    main()
