"""
The page to play with: its data are what the stages measure, and what a browser draws are its data.

$ python -m pytest tests/test_explore.py -m 'slow or not slow'
"""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from conftest import ROOT, near, random_model, tokens

import attention_maps
from lessons import explore
from lib.answers import bin_means
from lib.losses import loss_and_entropy

PAGE = ROOT / 'lessons/explore.html'
BROWSER = shutil.which('chromium') or shutil.which('google-chrome')


def data_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


@torch.no_grad()
@pytest.mark.parametrize('method', ['none', 'rope'])
def test_data_are_what_the_stages_measure(method, cpu):
    model, ids = random_model(position=method), tokens(3, 65)
    own, lengths = model.head_scale, [16, 32, 64]
    found = explore.measure_all(model, ids, 4, lengths, [1.0, 1.5], [0.5, 1.0])
    near(model.head_scale, own)

    def check(of_scale, scales, layer, head):
        model.head_scale = scales
        loss, heads = loss_and_entropy(model, ids.numpy(), 4, 10 ** 6, cpu)
        near(of_scale['loss'], bin_means(loss, 4)[1], rtol=6e-3)
        near(of_scale['entropy'], heads[layer, head], rtol=6e-3, atol=1e-4)
        for T, bins in zip(lengths, of_scale['distance'], strict=True):
            each = [attention_maps.window_maps(model, window[None, :T], layer, head)
                    for window in ids]
            shares = torch.stack([maps['by_distance'] for maps in each]).mean(0)
            near(bins[:len(shares)], shares, rtol=6e-3, atol=1e-5)
            assert not any(bins[len(shares):])

    for of_all, scale in zip(found['uniform'], [1.0, 1.5], strict=True):
        of_head = {key: of_all[key][1][2] for key in ('entropy', 'distance')}
        check({'loss': of_all['loss'], **of_head}, own * scale, 1, 2)
    for layer, head, n, scale in (0, 3, 0, 0.5), (0, 3, 1, 1.0), (1, 0, 0, 0.5):
        scales = own.clone()
        scales[layer, head] *= scale
        check(found['head'][layer][head][n], scales, layer, head)


def test_page_is_small_and_calls_for_nothing():
    text = PAGE.read_text(encoding='utf-8')
    script = text.rpartition('<script>')[2].partition('</script>')[0]
    assert len(text.encode()) <= 3e6 and script.count('\n') <= 400
    assert not re.search(r'(src|href)="(?!data:)|@import|fetch\(|import\(', text)
    assert explore.page_of(data_of(PAGE)) == text, 'run python -m lessons.explore --data=... again'


# ---------------------------------------------------------------------- in a browser

# Appended to the page: it moves sliders as STEPS say and writes down what is drawn after each.
DRIVER = '''<pre id="found"></pre><script>
const errors = [], states = [];
addEventListener('error', event => errors.push(event.message));
function curve(svg) {
  const ticks = [...svg.querySelectorAll('.tick')];
  const [[y0, v0], [y1, v1]] = [ticks[0], ticks.at(-1)].map(
    tick => [tick.getAttribute('y') - 4, +tick.textContent]);
  const points = svg.querySelector('.now').getAttribute('d').matchAll(/[\\d.]+ ([\\d.]+)/g);
  return [...points].map(point => v0 + (point[1] - y0) / (y1 - y0) * (v1 - v0));
}
for (const [id, places] of STEPS) {
  byId(id).value = +byId(id).value + places;
  byId(id).dispatchEvent(new Event('input', {bubbles: true}));
  states.push({
    uniform: +byId('uniform').value, scale: byId('uniform').getAttribute('aria-valuetext'),
    summary: byId('summary').textContent,
    models: data.models.map((_, n) => Object.fromEntries(['loss', 'entropy', 'distance'].map(
      kind => [kind, curve(document.querySelectorAll(`#${kind} svg`)[n])]))),
  });
}
const form = document.querySelector('form');
const controls = [getComputedStyle(form).position];
byId('distance').scrollIntoView();
controls.push(Math.round(form.getBoundingClientRect().top));
byId('found').textContent = JSON.stringify({
  states, errors, width: document.documentElement.scrollWidth, controls,
  order: [...document.querySelectorAll('input, select')].map(one => one.id),
  loaded: performance.getEntriesByType('resource').map(entry => entry.name),
});
</script>'''
STEPS = [('length', 0), ('uniform', 1), ('head', 1), ('chosen', 1), ('length', 1)]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason='needs Chromium: apt-get install chromium')
@pytest.mark.parametrize('width', [320, 390, 1200])
def test_sliders_move_the_curves_to_the_values_of_the_data(tmp_path, width):
    page, data = PAGE.read_text(encoding='utf-8'), data_of(PAGE)
    page = html.escape(page + DRIVER.replace('STEPS', json.dumps(STEPS)))
    (tmp_path / 'frame.html').write_text(
        f'<meta charset="utf-8"><iframe width="{width}" height="800" srcdoc="{page}" '
        'onload="document.body.textContent = '
        'this.contentDocument.getElementById(\'found\').textContent"></iframe>')
    run = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
                          f'--user-data-dir={tmp_path}/user', tmp_path / 'frame.html'],
                         capture_output=True, text=True)
    shown = json.loads(html.unescape(re.search('<body>(.*)</body>', run.stdout, re.S)[1]))
    assert (shown['errors'], shown['loaded']) == ([], [])
    assert shown['width'] <= width  # nothing is wider than the screen
    assert shown['controls'] == ['sticky', 0]  # they stay in sight beside the pictures
    assert shown['order'] == ['length', 'uniform', 'head', 'chosen']

    states, one, start = shown['states'], data['uniform'].index(1), data['uniform'].index(1.8)
    fourfold, by_head = data['lengths'].index(4 * data['block_size']), data['one_head'].index(1) + 1
    assert states[0]['summary'] != states[1]['summary']
    assert float(states[1]['scale']) == data['uniform'][start + 1] and states[2]['uniform'] == one
    for state, length, uniform, head, chosen in zip(
            states, [fourfold] * 4 + [fourfold + 1], [start, start + 1, one, one, one],
            [None, None, by_head, by_head, by_head], [0, 0, 0, 1, 1], strict=True):
        for model, drawn in zip(data['models'], state['models'], strict=True):
            layer, h = divmod(chosen, len(model['head'][0]))
            row = model['uniform'][uniform]
            wanted = {kind: row[kind][layer][h] for kind in ('entropy', 'distance')} | {
                'loss': row['loss']}
            if head is not None:
                wanted = model['head'][layer][h][head]
            bins = sum(p <= data['lengths'][length] for p in data['position'])
            for kind in 'loss', 'entropy':
                near(drawn[kind], wanted[kind][:bins], atol=1e-6)
            shares, bars = wanted['distance'][length], np.array(drawn['distance'][::2]) / 100
            near(bars, shares[:len(bars)], atol=1e-6)
            assert not any(shares[len(bars):])
