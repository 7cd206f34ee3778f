"""
The page on which the models run: model.js is model.py and tiktoken in another language, and the
page does what keys and clicks ask for.

$ python -m pytest tests/test_explore.py -m 'slow or not slow'
"""

import base64
import json
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from browser import BROWSER, browser
from conftest import ROOT, mistake, near, random_model, refuses, tokens
from plain import plain_losses

import kernels
from lessons import explore
from lib.checkpoints import load_model
from lib.tokenizers import get_tokenizer, tokenizer_state

PAGE = ROOT / 'lessons/explore.html'
NODE = shutil.which('node')
needs_node = pytest.mark.skipif(not NODE, reason='needs node: apt-get install nodejs')
L = 32  # of random_model()

@torch.no_grad()
def test_gain_of_a_head_is_how_far_sharpening_it_lowers_the_loss_past_L():
    model, [ids] = random_model(), tokens(1, 3 * L + 1)
    found, own = explore.head_gains(model, ids, lambda: None), model.head_scale.clone()
    before = plain_losses(model, ids[None])[0, L:].mean()
    for n in 0, 5:
        sharper = own.clone()
        sharper.view(-1)[n] *= explore.SHARPER
        near(found[n], before - plain_losses(model, ids[None], sharper)[0, L:].mean(), atol=1e-4)
    assert len(found) == 8 and torch.equal(model.head_scale, own)


# Reads questions from stdin as JSON and prints the answers as JSON.
DRIVER = '''
const {Tokenizer, Model, Reading} = require('ROOT/lessons/model.js');
const asked = JSON.parse(require('fs').readFileSync(0));
const ASK = {
  // A whole text, read in chunks of the given sizes. logp: of every `each`-th position.
  model: ({packed, scales, ids, chunks, each}) => {
    const model = new Model(packed), cache = model.newCache(ids.length);
    for (const n of chunks) model.read(ids.slice(cache.length, cache.length + n), cache, scales);
    const rows = ids.map((_, i) => i).filter(i => i % each === 0);
    return {logp: rows.map(i => Array.from(model.next(cache, i), Math.log)),
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
  // What a head gives to each position, for query i.
  attention: ({packed, scales, ids, i, layer, head}) => {
    const reading = new Reading(new Model(packed), scales, false, ids.length);
    reading.follow(ids);
    const {cache, place} = reading.at(i), weights = new Float64Array(i + 1);
    reading.model.weigh(weights, layer, head, place, cache);
    return Array.from(weights);
  },
  tokenizer: ({state, texts}) => {
    const tokenizer = new Tokenizer(state);
    return texts.map(text => {
      const ids = tokenizer.encode(text);
      return [ids, tokenizer.decode(ids)];
    });
  },
};
console.log(JSON.stringify(asked.map(([kind, question]) => ASK[kind](question))));
'''.replace('ROOT', ROOT.as_posix())


def node(*questions):
    """The answers of model.js under node. questions: (kind, dict), as DRIVER takes them."""
    run = subprocess.run([NODE, '-e', DRIVER], input=json.dumps(questions), capture_output=True,
                         text=True, encoding='utf-8')
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@torch.no_grad()
def packed(model):
    """A model as the page takes it. The model's own weights are rounded in place."""
    config = {name: value for name, value in vars(model.config).items()
              if isinstance(value, int | float)}
    tensors = explore.round_weights(model)
    return {'config': config, 'rope': explore.rope_of(model.config), 'tensors': tensors}


# ---------------------------------------------------------------------- model.js

@needs_node
@torch.no_grad()
@pytest.mark.parametrize('changes', [
    {}, {'position': 'rope'}, {'short_conv': 4}, {'short_conv': 3, 'short_conv_at': 'A'},
    {'position': 'rope', 'rope_scaling': 'yarn:4', 'tied': True},
    {'position': 'rope,none', 'rope_share': 0.5, 'short_conv': 2, 'short_conv_at': 'C'}], ids=str)
def test_model_js_computes_what_model_py_does_cached_and_uncached(changes):
    model, [ids] = random_model(**changes), tokens(1, 8 * L)
    sent, own = packed(model), model.head_scale
    for factor in 1.0, 1.7:
        same_as_pytorch(model, sent, ids, own * factor)


@torch.no_grad()
def same_as_pytorch(model, sent, ids, scales, each=1):
    """Fail unless model.js has the model's log-probabilities and entropies, cached and uncached."""
    model.head_scale = scales
    with model.probe(kernels.attention_entropy) as entropy:
        logp = model(ids[None])[0].log_softmax(-1)
    entropy = torch.stack(entropy)[:, 0].transpose(1, 2).flatten(1)  # (layers, T * H)
    question = {'packed': sent, 'scales': scales.flatten().tolist(), 'ids': ids.tolist(),
                'each': each}
    length = model.config.block_size
    for chunks in [len(ids)], [length + 1, 1, 1, 2, len(ids) - length - 5]:
        [found] = node(('model', question | {'chunks': chunks}))
        near(found['logp'], logp[::each], 1e-3)
        near(found['entropy'], entropy, 1e-3)


@needs_node
@torch.no_grad()
@pytest.mark.parametrize('cut', [False, True])
def test_reading_goes_on_where_a_text_changed(cut):
    """Both a longer text and one that was changed in the middle have the losses of a new pass."""
    model, [ids] = random_model(short_conv=4), tokens(1, 5 * L + 3)
    sent, changed = packed(model), ids.clone()
    changed[2 * L + 3] = (changed[2 * L + 3] + 1) % 61
    texts = [ids[:L + 5], ids, changed, ids[:10], changed[:4 * L]]
    [found] = node(('reading', {'packed': sent, 'scales': model.head_scale.flatten().tolist(),
                                'cut': cut, 'texts': [text.tolist() for text in texts]}))
    for losses, text in zip(found, texts, strict=True):
        near(losses, explore.losses_of(model, text, cut), 1e-3)


@torch.no_grad()
def test_cut_context_is_the_last_tokens():
    """Losses past L are those of passes of at most L tokens that end at or after the target."""
    model, [ids] = random_model(), tokens(1, 3 * L + 1)
    found, piece = explore.losses_of(model, ids, cut=True), L // 8
    for i in 5, L - 1, L, L + piece - 1, 2 * L + 1, 3 * L - 1:
        end = i + 1 if i < L else L + piece * (1 + (i - L) // piece)
        window = ids[max(0, end - L):i + 2]
        near(found[i], model(window[None, :-1], window[None, 1:])[0, -1], 1e-4)


@needs_node
@torch.no_grad()
def test_attention_that_the_page_shades_is_the_models():
    model, [ids] = random_model(position='rope'), tokens(1, 50)
    sent, seen = packed(model), {}

    def look(layer, attention, q, k, place):
        seen[layer] = attention.position.softmax(attention.position.scores(q, k, place.i, place.j))

    with model.probe(look):
        model(ids[None])
    question = {'packed': sent, 'scales': model.head_scale.flatten().tolist(), 'ids': ids.tolist()}
    for layer, head, i in (0, 3, 49), (1, 0, 20):
        [found] = node(('attention', question | {'layer': layer, 'head': head, 'i': i}))
        near(found, seen[layer][0, head, i, :i + 1], 1e-4)


# ---------------------------------------------------------------------- tokenizers

ODD = ["It's THE'LL we'Ve 'ſ don'T", 'a\r\n\r\n  b\n\n\tc   \n d  ', '1234567 3.14159e-10',
       'naïve Ωμέγα 漢字かな العربية हिन्दी', '\U0001f469\u200d\U0001f467 e\u0301', '', '\n', '    ',
       '\ufeffBOM\u0085next\u00a0space\u2028end', ' leading', 'trailing ', '\x00\x01\x7f',
       '<|endoftext|> is text', ""]


@needs_node
def test_tokenizers_of_the_page_are_tiktokens():
    draw = random.Random(0)
    pieces = [*ODD, 'self.assertEqual(', '_' * 9, '\t\t', ' \n', '\u3000', '٣٤٥٦', 'ǅ']
    texts = ODD + [''.join(draw.choices(pieces, k=8)) for _ in range(200)] + [
        ''.join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xd800),
                                 draw.randrange(0xe000, 0x11000)])) for _ in range(60))
        for _ in range(200)]
    texts += [path.read_text(encoding='utf-8') for path in (ROOT / 'model.py', ROOT / 'README.md')]
    for name in str(ROOT / 'data/code/bpe_1024.tiktoken'), 'bytes':
        theirs = get_tokenizer(name)
        state = explore.tokenizer_of(tokenizer_state(theirs), name)
        assert state['eot'] == theirs.eot_token
        [found] = node(('tokenizer', {'state': state, 'texts': texts}))
        for (ids, back), text in zip(found, texts, strict=True):
            assert ids == theirs.encode_ordinary(text), repr(text)
            assert back == text


# ---------------------------------------------------------------------- the packer

def test_rounding_keeps_gains_and_half_a_step():
    model, [ids] = random_model(), tokens(1, 40)
    before = {name: p.clone() for name, p in model.named_parameters()}
    tensors = packed(model)['tensors']
    with torch.no_grad():
        expected = model(ids[None])
    for name, entry in tensors.items():
        numbers = base64.b64decode(entry['numbers'])
        if 'rows' not in entry:
            near(np.frombuffer(numbers, np.float32), before[name].flatten())
            continue
        rows = np.frombuffer(base64.b64decode(entry['rows']), np.float32)[:, None]
        found = np.frombuffer(numbers, np.int8).reshape(entry['shape']) * rows
        weight = before[name]
        if name.endswith('attn.out.weight'):
            gain = before[name.replace('out.weight', 'head_gain')]
            weight = weight * gain.expand(-1, model.config.head_dim).flatten()
        assert (np.abs(found - weight.detach().numpy()) <= rows * 0.501).all(), name
    assert torch.isfinite(expected).all() and (model.blocks[0].attn.head_gain == 1).all()


@pytest.mark.parametrize('changes,named', [
    ({'position': 'alibi'}, "position 'alibi'"), ({'dape_kernel': 1}, "dape_kernel '1'"),
    ({'position': 'rope', 'rope_scaling': 'dynamic_ntk:2'}, "rope_scaling 'dynamic_ntk:2'"),
    ({'position': 'rope', 'rope_window': 8}, "rope_window '8'"),
    ({'position': 'rope', 'random_positions': 99}, "random_positions '99'")], ids=str)
def test_models_that_the_page_cannot_compute_are_refused(changes, named):
    refuses(named, explore.require_supported, random_model(**changes), 'x.pt')


@pytest.mark.parametrize('scales, said', [
    (['none/scale_head_1024', 'conv/scale_head_1024'], 'scale_head_1024.json was tuned for none'),
    (['none/scale_head_1024', 'none/scale_head_1024'], 'is the second file')])
def test_scale_files_that_the_page_would_not_show_are_refused(tmp_path, scales, said):
    files = json.dumps([f'{ROOT}/lessons/models/{name}.json' for name in scales])
    assert said in mistake('lessons/explore', f'--page={tmp_path}/x.html', f'--scales={files}',
                           '--models=["lessons/models/none/last.pt"]')


def test_scales_per_channel_and_other_tokenizers_are_refused():
    model = random_model()
    model.head_scale = torch.ones(2, 4, 8)
    refuses('one scale per channel', explore.require_supported, model, 'x.pt')
    state = tokenizer_state(get_tokenizer(str(ROOT / 'data/code/bpe_1024.tiktoken')))
    for other in None, {'kind': 'hf', 'name': 'x'}, state | {'pattern': r'\S+|\s+'}:
        refuses('tokenizer', explore.tokenizer_of, other, 'x.pt')


# ---------------------------------------------------------------------- the page

def test_page_is_small_calls_for_nothing_and_holds_the_present_scripts():
    text = PAGE.read_text(encoding='utf-8')
    assert len(text.encode()) <= 6e6
    assert not re.search(r'src="|href="(?!data:|\.\./results/)|@import|fetch\(|import\(', text)
    for name, most in ('model.js', 400), ('explore.js', 500):
        lines = (ROOT / 'lessons' / name).read_text(encoding='utf-8').splitlines()
        assert len(lines) <= most and max(map(len, lines)) <= 100, name
    again = explore.page_of(explore.data_of(PAGE))
    assert again == text, 'run python -m lessons.explore --keep=True'


def test_words_of_the_page_follow_from_the_numbers():
    found = explore.data_of(PAGE)
    text = re.search('aria-label="(Loss by position[^"]*)"', PAGE.read_text(encoding='utf-8'))[1]
    ends = [float(number) for number in re.findall(r' (\d\.\d\d)', text)]
    L = found['L']
    assert ends == sorted(ends, reverse=True) and len(ends) == len(found['first'])
    assert text.startswith('Loss by position. Just past L, it rises for: all.') == all(
        np.mean(one['losses'][L:2 * L]) > np.mean(one['losses'][:L]) for one in found['first'])
    changed = [one | {'losses': one['losses'][::-1]} for one in found['first']]
    assert 'it rises for: none' in explore.trend(found | {'first': changed})
    assert '3.52 nats; up to token 128 it is 2.22' in explore.point(found)
    # "Tuning helps, but not looking back is still better, except where text repeats."
    rows = re.findall('(worse|better) by (.....?)</td>', explore.study())
    assert [word for word, _ in rows] == ['worse'] * 5 + ['better', 'worse', 'better']
    assert all(rows[n + 2][1] < rows[n][1] for n in (0, 1, 4)) and rows[7][1] > rows[5][1]


@needs_node
@pytest.mark.slow
def test_stored_losses_are_those_that_the_page_computes():
    found = explore.data_of(PAGE)
    for model in found['models']:
        for kind, losses in model['stored']['losses'].items():
            scales, cut = model['sets'][kind.removesuffix(' cut')], kind.endswith(' cut')
            [[ours]] = node(('reading', {'packed': model['packed'], 'scales': scales, 'cut': cut,
                                         'texts': [found['ids']]}))
            near(ours, losses, 2e-3)  # stored with three decimals


@pytest.mark.slow
@torch.no_grad()
def test_trained_models_lose_less_than_a_hundredth_nat_in_8_bits_and_run_in_model_js():
    ids, found = torch.tensor(explore.data_of(PAGE)['ids']), explore.data_of(PAGE)['models']
    for path, shown in zip(explore.models, found, strict=True):
        model, _ = load_model(ROOT / path, '', 'cpu')
        before = explore.losses_of(model, ids)
        sent = packed(model)
        assert sent == shown['packed']
        after, length = explore.losses_of(model, ids), model.config.block_size
        for part in slice(0, length), slice(length, None):
            assert abs(after[part].mean() - before[part].mean()) < 0.01, (path, part)
        for scales in shown['sets'].values() if NODE else []:
            same_as_pytorch(model, sent, ids, torch.tensor(scales).view(4, 8), each=8)


# ---------------------------------------------------------------------- in a browser

@pytest.fixture(scope='module')
def chromium(tmp_path_factory):
    if not BROWSER:
        pytest.skip('needs Chromium: apt-get install chromium')
    with browser(tmp_path_factory.mktemp('chromium')) as page:
        yield page


def text_of(name):
    return f"document.getElementById('{name}').textContent"


def value_of(name):
    return f"document.getElementById('{name}').value"


STATUS = text_of('status')
READ = f"/^[0-9]+ tokens/.test({STATUS})"
COMPARED = f"{READ} && {STATUS}.includes('as trained')"
BARS = "document.getElementById('bars').children.length > 0"
OPEN_HEAD = "document.querySelector('#heads [aria-pressed=true]').getAttribute('aria-label')"
HEADS = "[...document.querySelectorAll('#heads button')].map(button => button.textContent).join()"


def give_text(chromium, text):
    """Replace the text of the page with real keys."""
    chromium.click('#text')
    chromium.value("document.getElementById('text').select()")
    chromium.type(text)


def move(chromium, slider, times=8):
    chromium.value(f"document.getElementById('{slider}').focus()")
    chromium.key('ArrowRight', times)


@pytest.mark.slow
def test_keys_and_clicks_do_what_they_say(chromium):
    chromium.open(PAGE.as_uri(), 1280, 800)
    assert chromium.value("document.querySelectorAll('#first .tokens').length") == 3

    # type a text
    give_text(chromium, 'def add(a, b):\n    return a')
    chromium.until(f'/^1[0-9] tokens/.test({STATUS})')
    before = chromium.value(STATUS)
    assert 'Needs more than 128 tokens to pass L (you have 1' in before
    assert 't=def' in chromium.value('location.hash')
    assert chromium.value(value_of('example')) == '-1'  # its own text
    corners = "document.getElementById('curve-after').getAttribute('points').split(' ').length"
    assert chromium.value(corners) > 5  # a short text has a curve, too

    # look at a token with the keyboard: what was expected, and what a head attends to
    chromium.value("document.getElementById('mine').focus()")
    chromium.key('End')
    chromium.until(BARS)
    assert 'had a chance of' in chromium.value(text_of('said'))
    assert chromium.value("[...document.querySelectorAll('#mine span')]"
                          '.some(span => span.style.boxShadow)')
    [bottom, drawer] = chromium.value(
        "[document.querySelector('#mine .now').getBoundingClientRect().bottom,"
        " document.getElementById('detail').getBoundingClientRect().top]")
    assert bottom <= drawer  # the token is in sight
    chromium.key('Home')
    chromium.until(f"{text_of('said')}.includes('There is nothing before it')")
    chromium.click('#close')
    assert chromium.value("document.getElementById('detail').hidden")

    # choose another head, and move both sliders, which say what they scale
    head = chromium.value(OPEN_HEAD)
    chromium.click('#heads [aria-label^="Layer 0, head 1"]')
    chromium.key('ArrowRight')
    assert chromium.value(OPEN_HEAD) != head
    assert chromium.value(OPEN_HEAD).startswith('Layer 0, head 2')
    chromium.key('End')
    assert chromium.value(OPEN_HEAD).startswith('Layer 0, head 7')
    chromium.key('Home')
    for slider, name in ('factor', 'Scale of all heads'), ('scale', 'Scale of layer 0, head 0'):
        chromium.value(f"document.getElementById('{slider}').focus()")
        assert chromium.value('document.activeElement.ariaLabel') == name
        chromium.key('ArrowRight', 8)
        chromium.until(f'{COMPARED} && {STATUS} !== {json.dumps(before)}')
        before = chromium.value(STATUS)
    assert chromium.value(value_of('preset')) == 'mine'

    # the address brings everything back
    address = chromium.value('location.href')
    chromium.open(address, 1280, 800)
    chromium.until(f'{STATUS} === {json.dumps(before)}')
    assert chromium.value('scrollY') > 0  # at what the address is about
    assert chromium.errors == []


@pytest.mark.slow
def test_first_text_is_cut_written_on_and_asked_for_a_key(chromium):
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    chromium.click('#factor', 0.9)
    chromium.until(f'!{READ}')
    chromium.click('#cut')
    chromium.until(f"{STATUS}.startsWith('Reading: ')")  # it fills in from the left
    chromium.click('#write')
    for name in 'whole', 'cut':
        chromium.until(f"document.getElementById('written-{name}').children[1].textContent", 300)
    chromium.click('#write')
    assert chromium.value(text_of('write')) == 'Write on'
    chromium.click('#hide')
    verdict = "document.querySelector('#keys td:nth-child(5)').textContent"
    chromium.until(f'!{verdict}.includes("…")', 300)
    assert chromium.value(verdict) == 'read it (5 of 5 lower)'  # the convolution, at 32 tokens
    chromium.until(READ, 300)
    assert chromium.errors == []


@pytest.mark.slow
def test_reading_is_finished_after_a_far_token_was_looked_at(chromium):
    """Looking reads ahead, past what the page has. The page shows those losses all the same."""
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    move(chromium, 'factor')
    chromium.until(f'!{READ}')
    chromium.value("document.getElementById('mine').focus()")
    chromium.key('End')
    chromium.until(COMPARED, 300)
    assert chromium.value(STATUS).startswith('1024 tokens: ')
    corners = ("['before', 'after'].map(name => document.getElementById('curve-' + name)"
               ".getAttribute('points').split(' ').length)")
    assert chromium.value(corners) == [32, 32]  # both up to the end
    shown = '[...document.querySelectorAll("#mine [data-i]")]'
    assert chromium.value(f'{shown}.every(span => span.style.getPropertyValue("--loss"))')

    # scales that were tuned below 0 come back from an address
    chromium.value(f"{value_of('preset')} = 'head'; document.getElementById('preset')"
                   ".dispatchEvent(new Event('input'))")
    chromium.until(f"{COMPARED} && location.hash.includes('_-0.')")
    chromium.open(chromium.value('location.href'), 1280, 800)
    chromium.until(COMPARED)
    assert chromium.value(value_of('preset')) == 'head'
    assert chromium.errors == []


@pytest.mark.slow
def test_head_numbers_say_what_they_were_measured_on(chromium):
    old = "document.getElementById('heads').classList.contains('old')"
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    numbers = chromium.value(HEADS)
    assert not chromium.value(old)
    move(chromium, 'factor', 1)
    assert chromium.value(old) and chromium.value(HEADS) == numbers
    assert chromium.value(text_of('measured')) == 'Measured on: first text, NoPE, as trained.'

    # numbers of one's own text outlive a slider, but not another text or a new visit
    give_text(chromium, 'a b c d')
    chromium.until(READ)
    assert chromium.value(text_of('measured')) == 'Not measured for this text.'
    assert set(chromium.value(HEADS).split(',')) == {'·'}
    chromium.click('#measure')
    chromium.until(f"{text_of('measure')} === 'Measure (about 1 minute)'")
    numbers = chromium.value(HEADS)
    assert '·' not in numbers and not chromium.value(old)
    move(chromium, 'scale', 1)
    assert chromium.value(old) and chromium.value(HEADS) == numbers
    assert 'your text, its second half, NoPE, your own scales' in chromium.value(
        text_of('measured'))
    chromium.until(COMPARED)
    chromium.open(chromium.value('location.href'), 1280, 800)
    chromium.until(READ)
    assert set(chromium.value(HEADS).split(',')) == {'·'}

    # a measurement that was stopped leaves nothing behind
    chromium.click('#measure')
    assert chromium.value(text_of('measure')).startswith('Stop')
    chromium.click('#measure')
    assert chromium.value(text_of('measured')) == 'Not measured for this text.'
    assert chromium.errors == []


@pytest.mark.slow
def test_guess_changes_no_settings_and_ends_where_the_text_ends(chromium):
    guess = "document.getElementById('curve-guess').getAttribute('points')"
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    move(chromium, 'factor', 1)
    chromium.until(COMPARED, 300)
    settings = f"[{value_of('model')}, {value_of('preset')}, {STATUS}].join()"
    before = chromium.value(settings)
    chromium.click('#guess')
    chromium.drag('#chart', (0.3, 0.5), (0.5, 0.2), (0.9, 0.9))
    assert chromium.value('getSelection().toString()') == ''  # no axis label is selected
    assert chromium.value(guess).split(' ')[-1] != '8,3'
    chromium.click('#guess')
    assert 'nats off' in chromium.value(text_of('guess-says'))
    assert chromium.value(settings) == before

    give_text(chromium, 'x = 1\n' * 40)
    chromium.until(f'{COMPARED} && !{STATUS}.startsWith("1024")')
    assert chromium.value(guess) == chromium.value(text_of('guess-says')) == ''
    chromium.click('#guess')
    end = float(chromium.value(guess).split(' ')[-1].split(',')[0])
    assert end == int(chromium.value(STATUS).split()[0]) / 128
    assert chromium.errors == []


@pytest.mark.slow
def test_odd_texts_and_chances_are_said_in_words(chromium):
    chromium.open(PAGE.as_uri(), 1280, 800)
    assert chromium.value('[.99951, .9971, .5, .0012, .0002].map(percent)') == [
        'more than 99.9%', '99.7%', '50.0%', '0.1%', '1 in 5,000']
    link = chromium.value("document.querySelector('#study a').href")
    assert link == (ROOT / 'results/past_L/README.md').as_uri()
    give_text(chromium, ' ' * 600)
    chromium.until(READ)
    assert chromium.value("(box => box.scrollWidth <= box.clientWidth)"
                          "(document.getElementById('mine'))")
    chromium.value("document.getElementById('text').select()")
    chromium.key('Delete')
    chromium.until(f"{STATUS} === 'No text yet.'")
    chromium.click('#write')
    assert chromium.value(text_of('write-says')) == 'Write a few words first.'
    assert chromium.value(text_of('write')) == 'Write on'
    assert chromium.errors == []


@pytest.mark.slow
def test_nothing_of_an_older_text_or_model_stays_in_sight(chromium):
    colored = "document.querySelectorAll('#mine span[style*=loss]').length"
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    assert chromium.value(colored) == 1024
    give = "document.getElementById('text').value = 'na\u00efve \ud83d\ude00'"
    chromium.value(f"{give}, document.getElementById('text').dispatchEvent(new Event('input'))")
    chromium.until(f'{READ} && !{STATUS}.startsWith("1024")')
    shown = chromium.value("document.getElementById('mine').textContent")
    assert '<f0>' in shown and '\ufffd' not in shown
    chromium.value('mine.look(3)')
    chromium.until(BARS)
    chromium.click('#write')
    chromium.until(f"{text_of('write')} === 'Write on'")
    assert chromium.value(text_of('wrote-cut')) == ' (NoPE, as trained)'

    # other settings: tokens have no color before they are read again
    left = chromium.value("state.model = 1, read(), document.querySelectorAll("
                          "'#mine span[style*=loss]').length")
    assert left == 0
    chromium.value("document.getElementById('text').select()")
    chromium.key('Delete')
    chromium.until(f"{STATUS} === 'No text yet.'")
    assert chromium.value("document.getElementById('detail').hidden")
    assert chromium.errors == []


@pytest.mark.slow
def test_an_error_of_the_model_is_shown(chromium):
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    chromium.value("ask('mine', 'no such job', {}, () => {})")
    chromium.until(f"{STATUS}.startsWith('The model stopped')")


@pytest.mark.slow
def test_one_long_word_does_not_stop_the_page(chromium):
    chromium.open(PAGE.as_uri(), 1280, 800)
    chromium.until(READ)
    seconds = chromium.value("""(() => {
        const began = performance.now();
        tokenizer.encode('xyzw'.repeat(6000), MOST);
        return (performance.now() - began) / 1000;
    })()""")
    assert seconds < 10


@pytest.mark.slow
def test_page_alone_has_no_link_into_the_project(chromium, tmp_path):
    alone = shutil.copy(PAGE, tmp_path)
    chromium.open(f'file://{alone}', 1280, 800)
    assert chromium.value("document.getElementById('study').innerHTML") == 'results/past_L'


@pytest.mark.slow
@pytest.mark.parametrize('width', [320, 390, 1280])
def test_page_fits_a_phone(chromium, width):
    chromium.open(PAGE.as_uri(), width, 800)
    assert chromium.value('document.documentElement.scrollWidth') <= width
    chromium.value("document.getElementById('heads').scrollIntoView({block: 'center'})")
    [top, height] = chromium.value("(r => [r.top, r.height])(document.querySelector('form')"
                                   '.getBoundingClientRect())')
    assert top == 0  # the controls and both losses stay in sight beside the curves
    assert height <= 90 or width > 800


@pytest.mark.slow
def test_reader_without_javascript_sees_pictures_words_and_studies(chromium):
    chromium.open(PAGE.as_uri(), 800, 800, script=False)
    chromium.until("document.querySelectorAll('noscript .tokens span').length === 1024")
    assert chromium.value("document.getElementById('more').offsetHeight") > 300
    assert chromium.value("document.getElementById('play').offsetHeight") == 0
    shown = chromium.command('Page.captureScreenshot')['data']
    assert len(shown) > 20_000  # a blank page has less
