"""
The page on which the models run: model.js is model.py and tiktoken in another language, and what a
model or a scale file is called does not become part of the page's code.

$ python -m pytest tests/test_explore.py -m ''
"""

import json
import os
import random
import shutil
import subprocess
import time

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
def packed(model):
    """A model as the page takes it, and its scales. Its own weights are rounded in place."""
    ids = tokens(1, 8 * L + 1)[0]
    return explore.model_of(model, {'path': '', 'digest': ''}, ids)['packed']


@torch.no_grad()
def same_as_pytorch(model, sent, ids, scales, each=1):
    """Fail unless model.js has the model's log-probabilities and entropies, cached and uncached."""
    model.head_scale = scales
    logp, targets = model(ids[None])[0].log_softmax(-1), ids[None].roll(-1)
    entropy = entropies(model, ids[None], targets)[0][:, 0].transpose(1, 2).flatten(1)
    length = model.config.block_size
    for chunks in [len(ids)], [length + 1, 1, 1, 2, len(ids) - length - 5]:
        found = node('model', packed=sent, scales=scales.flatten().tolist(), ids=ids.tolist(),
                     chunks=chunks, each=each)
        near(found['logp'], logp[::each], 1e-3)
        near(found['entropy'], entropy, 1e-3)


@needs_node
@pytest.mark.parametrize('changes', [
    {}, {'position': 'rope'}, {'short_conv': 4}, {'short_conv': 3, 'short_conv_at': 'A'},
    {'position': 'rope', 'rope_scaling': 'yarn:4', 'tied': True},
    {'position': 'rope,none', 'rope_share': 0.5, 'short_conv': 2, 'short_conv_at': 'C'}], ids=str)
def test_model_js_computes_what_model_py_does(changes):
    model = random_model(**changes)
    for block in model.blocks:
        block.attn.head_gain.data.fill_(1)
    same_as_pytorch(model, packed(model), tokens(1, 8 * L)[0], 1.7 * model.head_scale)


@needs_node
@torch.no_grad()
@pytest.mark.parametrize('cut', [False, True])
def test_reading_goes_on_where_a_text_changed(cut):
    """
    A longer text, and one that was changed in the middle, have the losses of new passes; with
    `cut`, those of the last L tokens, up to the end of a piece of L / 8.
    """
    model, ids = random_model(short_conv=4), tokens(1, 5 * L + 1)[0]
    for block in model.blocks:
        block.attn.head_gain.data.fill_(1)
    sent, changed, piece = packed(model), ids.clone(), L // 8
    changed[2 * L + 3] = (changed[2 * L + 3] + 1) % 61
    texts = [ids[:L + 5], ids, changed, ids[:10], changed[:4 * L + 1]]
    found = node('reading', packed=sent, scales=model.head_scale.flatten().tolist(), cut=cut,
                 texts=[text.tolist() for text in texts])
    for losses, text in zip(found, texts, strict=True):
        for i in range(0, len(text) - 1, 3):
            end = i + 1 if i < L or not cut else L + piece * (1 + (i - L) // piece)
            window = text[max(0, end - L if cut else 0):i + 2]
            near(losses[i], model(window[None, :-1], window[None, -1:])[0, 0], 1e-3)
        if len(text) > L + 5:
            near(losses, explore.losses_of(model, text, cut), 1e-3)


@needs_node
def test_tokenizers_of_the_page_are_tiktokens():
    draw = random.Random(0)
    odd = ["It's THE'LL we'Ve 'ſ don'T", 'a\r\n\r\n  b\n\n\tc   \n d  ', '1234567 3.14159e-10',
           'naïve Ωμέγα 漢字かな العربية हिन्दी', '\U0001f469\u200d\U0001f467 e\u0301', '', '    ',
           '\ufeffBOM\u0085next\u00a0space\u2028end', ' leading', 'trailing ', '\x00\x01\x7f',
           '<|endoftext|> is text', 'self.assertEqual(', '_' * 9, '\t\t', ' \n', '\u3000', '٣٤٥٦']
    texts = odd + [''.join(draw.choices(odd, k=8)) for _ in range(200)]
    texts += [''.join(chr(draw.choice([draw.randrange(32, 127), draw.randrange(0xd800)]))
                      for _ in range(60)) for _ in range(200)]
    for name in str(ROOT / 'data/code/bpe_1024.tiktoken'), 'bytes':
        theirs = get_tokenizer(name)
        state = explore.tokenizer_of(tokenizer_state(theirs), name)
        expected = [[theirs.encode_ordinary(text), text] for text in texts]
        assert node('tokenizer', state=state, texts=texts) == expected


# ---------------------------------------------------------------------- explore.py

@pytest.mark.parametrize('changes', [
    {'position': 'alibi'}, {'dape_kernel': 1}, {'position': 'rope', 'rope_window': 8},
    {'position': 'rope', 'rope_scaling': 'dynamic_ntk:2'},
    {'position': 'rope', 'random_positions': 99}], ids=str)
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
    for path, shown in zip(explore.models, found['models'], strict=True):
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

@pytest.fixture
def chromium(tmp_path):
    """
    chromium(method, ...): a command of the DevTools protocol to a page in a headless Chromium.
    Commands and answers are JSON that ends with a zero byte. chromium.events: all that came between
    answers.
    """
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        ['bash', '-c', f'exec {BROWSER} --headless --no-sandbox --remote-debugging-pipe '
         f'--user-data-dir={tmp_path}/user 3<&{read_commands} 4>&{write_answers}'],
        pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL)
    of_page = {}

    def command(method, **params):
        message = json.dumps({'id': 1, 'method': method, 'params': params, **of_page})
        os.write(commands, message.encode() + b'\0')
        while True:
            line = b''
            while not line.endswith(b'\0'):
                line += os.read(answers, 1)
            answer = json.loads(line[:-1])
            if 'id' in answer:
                return answer['result']
            command.events.append(answer)

    command.events = []
    target = command('Target.createTarget', url='about:blank')['targetId']
    of_page['sessionId'] = command('Target.attachToTarget', targetId=target,
                                   flatten=True)['sessionId']
    yield command
    process.terminate()
    process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason='needs Chromium: apt-get install chromium')
def test_page_runs_its_models_and_takes_names_as_text(chromium, tmp_path):
    found, name = data_of(PAGE), '</script><img src=x onerror="hacked = 1"><b id="b">'
    found['dataset'] = found['source'] = name
    sets, stored = found['models'][0]['sets'], found['models'][0]['stored']['losses']
    sets[name], stored[name] = sets.pop('head'), stored.pop('head')
    (tmp_path / 'page.html').write_text(explore.page_of(found), encoding='utf-8')

    def value(expression):
        answer = chromium('Runtime.evaluate', expression=expression, returnByValue=True)
        return answer['result'].get('value')

    for domain in 'Runtime', 'Log':
        chromium(f'{domain}.enable')
    chromium('Page.navigate', url=f'file://{tmp_path}/page.html#x=1.4&m=2')
    status, began = "document.getElementById('status').textContent", time.monotonic()
    while 'as trained' not in str(value(f"document.getElementById('status') && {status}")):
        assert time.monotonic() - began < 120
    assert value(status).startswith('1024 tokens: loss')
    assert value("document.getElementById('preset').textContent").count(name) == 1
    assert name in value("document.getElementById('about').textContent")
    assert value("typeof hacked + document.querySelectorAll('#b, img').length") == 'undefined0'
    wrong = [event for event in chromium.events
             if event['method'] in ('Runtime.exceptionThrown', 'Log.entryAdded')]
    assert wrong == []
    # a script that is not the page's does not run
    value("""document.body.append(Object.assign(document.createElement('script'),
                                                {textContent: 'hacked = 1'}))""")
    assert value('typeof hacked') == 'undefined'
