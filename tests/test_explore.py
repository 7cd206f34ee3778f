"""
The page on which the models run: model.js is model.py and tiktoken in another language, and what a
model or a scale file is called does not become part of the page's code.

$ python -m pytest tests/test_explore.py -m ''
"""

import html
import json
import random
import shutil
import subprocess

from configurator import ROOT, UserError

import pytest
import torch
from conftest import near, random_model, tokens

from entropy import entropies
from lessons import explore
from tokenizer import get_tokenizer, tokenizer_state

PAGE = ROOT / 'lessons/explore.html'
NODE, BROWSER = shutil.which('node'), shutil.which('chromium')
needs_node = pytest.mark.skipif(not NODE, reason='needs node: apt-get install nodejs')
L = 32  # of random_model()


def data_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(text.split('id="data">')[1].split('</script>')[0])


# ---------------------------------------------------------------------- model.js

# Reads questions from stdin as JSON and prints the answers as JSON.
DRIVER = '''
const {Tokenizer, Model, Reading} = require('ROOT/lessons/model.js');
const ASK = {
  // A whole text, read in chunks of the given sizes.
  model: ({packed, scales, ids, chunks}) => {
    const model = new Model(packed), cache = model.newCache(ids.length);
    for (const n of chunks) model.read(ids.slice(cache.length, cache.length + n), cache, scales);
    return {logp: ids.map((_, i) => Array.from(model.next(cache, i), Math.log)),
            entropy: cache.layers.map(layer => Array.from(layer.entropy))};
  },
  // Several texts, one after the other, by one reading: the losses of each.
  reading: ({packed, scales, cut, texts}) => {
    const reading = new Reading(new Model(packed), scales, cut, 1200);
    return texts.map(ids => {
      reading.follow(ids);
      while (reading.step().length);
      return [...reading.losses];
    });
  },
  tokenizer: ({state, texts}) => {
    const tokenizer = new Tokenizer(state);
    return texts.map(text => [tokenizer.encode(text), tokenizer.decode(tokenizer.encode(text))]);
  },
};
const [kind, question] = JSON.parse(require('fs').readFileSync(0));
console.log(JSON.stringify(ASK[kind](question)));
'''.replace('ROOT', ROOT.as_posix())


def node(kind, **question):
    """The answer of model.js under node."""
    return json.loads(subprocess.run([NODE, '-e', DRIVER], input=json.dumps([kind, question]),
                                     stdout=subprocess.PIPE, text=True, check=True).stdout)


@torch.no_grad()
def page_model(**changes):
    """A random model without head gains, its weights rounded, and what the page gets of it."""
    model = random_model(**changes)
    for block in model.blocks:
        block.attn.head_gain.data.fill_(1)
    ids = tokens(1, 8 * L + 1)[0]
    return model, explore.model_of(model, {'path': '', 'digest': ''}, ids)['packed']


@needs_node
@torch.no_grad()
@pytest.mark.parametrize('changes', [
    {}, {'position': 'rope'}, {'short_conv': 4},
    {'position': 'rope', 'rope_scaling': 'yarn:4', 'tied': True},
    {'position': 'rope,none', 'short_conv': 2}], ids=str)
def test_model_js_computes_what_model_py_does(changes):
    model, packed = page_model(**changes)
    model.head_scale = 1.7 * model.head_scale
    ids = tokens(1, 8 * L)
    entropy = entropies(model, ids, ids.roll(-1))[0][:, 0].transpose(1, 2).flatten(1)
    for chunks in [8 * L], [L + 1, 1, 1, 2, 7 * L - 5]:  # in one piece, and with a cache
        found = node('model', packed=packed, scales=model.head_scale.flatten().tolist(),
                     ids=ids[0].tolist(), chunks=chunks)
        near(found['logp'], model(ids)[0].log_softmax(-1), 1e-3)
        near(found['entropy'], entropy, 1e-3)


@needs_node
def test_tokenizers_of_the_page_are_tiktokens():
    draw = random.Random(0)
    odd = ["It's THE'LL we'Ve 'ſ don'T", 'a\r\n\r\n  b\n\n\tc   \n d  ', '1234567 3.14159e-10',
           'naïve Ωμέγα 漢字かな العربية हिन्दी', '\U0001f469\u200d\U0001f467 e\u0301', '', '    ',
           '\ufeffBOM\u0085next\u00a0space\u2028end', ' leading', 'trailing ', '\x00\x01\x7f',
           '<|endoftext|> is text', 'self.assertEqual(', '_' * 9, '\t\t', ' \n', '\u3000', '٣٤٥٦']
    texts = odd + [''.join(draw.choices(odd, k=8)) for _ in range(200)]
    for name in str(ROOT / 'data/code/bpe_1024.tiktoken'), 'bytes':
        theirs = get_tokenizer(name)
        state = explore.tokenizer_of(tokenizer_state(theirs))
        expected = [[theirs.encode_ordinary(text), text] for text in texts]
        assert node('tokenizer', state=state, texts=texts) == expected


# ---------------------------------------------------------------------- explore.py

@pytest.mark.parametrize('changes', [
    {'position': 'alibi'}, {'dape_kernel': 1},
    {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2'}], ids=str)
def test_models_that_the_page_cannot_compute_are_refused(changes):
    with pytest.raises(UserError, match='x.pt is not for the page'):
        explore.rope_of(random_model(**changes), 'x.pt')


@needs_node
@pytest.mark.slow
@torch.no_grad()
def test_page_holds_the_present_scripts_and_the_losses_that_they_compute(cpu):
    found = data_of(PAGE)
    assert explore.page_of(found) == PAGE.read_text('utf-8'), 'run python -m lessons.explore'
    ids = torch.tensor(found['ids'])
    for path, shown in zip(explore.models, found['models']):
        model, _ = explore.open_model(str(ROOT / path), '', cpu)
        near(explore.losses_of(model, ids).mean(), sum(shown['stored']['losses']['own']) / len(ids),
             0.01)  # 8 bits cost little
        tensors = explore.pack_weights(model)
        assert tensors == shown['packed']['tensors']
        for kind, losses in shown['stored']['losses'].items():
            scales = shown['sets'][kind.removesuffix(' cut')]
            ours = node('reading', packed=shown['packed'], scales=scales, cut='cut' in kind,
                        texts=[found['ids']])
            near(ours[0], losses, 2e-3)  # stored with three decimals


# ---------------------------------------------------------------------- in a browser

@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason='needs Chromium: apt-get install chromium')
def test_page_shows_names_as_text(tmp_path):
    found, name = data_of(PAGE), '</script><img src=x onerror="document.title = 1">'
    found['dataset'] = name
    sets, losses = found['models'][0]['sets'], found['models'][0]['stored']['losses']
    sets[name], losses[name] = sets.pop('head'), losses.pop('head')
    (tmp_path / 'page.html').write_text(explore.page_of(found))
    page = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--dump-dom',
                           f'--user-data-dir={tmp_path}/user', f'{tmp_path}/page.html'],
                          stdout=subprocess.PIPE, text=True, check=True).stdout
    assert 'tokens so far' in page
    assert page.count(html.escape(name, quote=False)) == 3 and '<img' not in page
    assert '<title>How far' in page
