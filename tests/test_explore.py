"""
The page to play with: its data are what the stages measure, and what a browser draws are its data.

$ python -m pytest tests/test_explore.py -m 'slow or not slow'
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, near, random_model, tokens

import attention_maps
import entropy
from lessons import explore

PAGE = ROOT / 'lessons/explore.html'
BROWSER = shutil.which('chromium') or shutil.which('google-chrome')


def data_of(page):
    text = page.read_text(encoding='utf-8')
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


class Samples:
    """Windows that were drawn already, for a stage."""
    block_size = 64

    def __init__(self, ids):
        self.ids = ids

    def evenly_spaced(self, n):
        return self.ids[:n].numpy()


@torch.no_grad()
@pytest.mark.parametrize('method', ['none', 'rope'])
def test_data_are_what_the_stages_measure(method, cpu):
    model, ids = random_model(position=method), tokens(3, 65)
    own, lengths = model.head_scale, [16, 32, 64]
    found = explore.measure_all(model, ids, 4, lengths, [1.0, 1.5], [0.5, 1.0])
    near(model.head_scale, own)

    def check(of_scale, scales, layer, head):
        model.head_scale = scales
        _, loss, heads = entropy.measure_entropy(model, Samples(ids), 3, 10 ** 6, 4, cpu)
        near(of_scale['loss'], loss, rtol=6e-3)
        near(of_scale['entropy'], heads[layer, head], rtol=6e-3, atol=1e-4)
        for n, T in enumerate(lengths):
            each = [attention_maps.measure(model, window[None, :T], layer, head)['by_distance']
                    for window in ids]
            shares = torch.stack(each).mean(0)
            near(of_scale['distance'][n][:len(shares)], shares, rtol=6e-3, atol=1e-5)
            assert not any(of_scale['distance'][n][len(shares):])

    for n, scale in enumerate([1.0, 1.5]):
        of_all = found['uniform'][n]
        of_head = {key: np.array(of_all[key])[1, 2] for key in ('entropy', 'distance')}
        check({'loss': of_all['loss'], **of_head}, own * scale, 1, 2)
    for layer, head in ((0, 3), (1, 0)):
        for n, scale in enumerate([0.5, 1.0]):
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

class Browser:
    """Chromium without a window, spoken to over two pipes in the DevTools protocol."""

    def __init__(self, folder):
        (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
        command = (f'exec {BROWSER} --headless --no-sandbox --disable-gpu --remote-debugging-pipe '
                   f'--user-data-dir={folder} 3<&{read_there} 4>&{write_there}')
        self.process = subprocess.Popen(['bash', '-c', command], stderr=subprocess.DEVNULL,
                                        pass_fds=(read_there, write_there))
        os.close(read_there)
        os.close(write_there)
        self.to, self.of = os.fdopen(write_here, 'wb', 0), os.fdopen(read_here, 'rb', 0)
        self.n, self.session, self.events = 0, None, []

    def message(self):
        text = bytearray()
        while (byte := self.of.read(1)) != b'\0':
            assert byte, 'the browser has ended'
            text += byte
        return json.loads(text)

    def ask(self, method, **params):
        self.n += 1
        call = {'id': self.n, 'method': method, 'params': params}
        if self.session:
            call['sessionId'] = self.session
        self.to.write(json.dumps(call).encode() + b'\0')
        while (answer := self.message()).get('id') != self.n:
            self.events.append(answer)
        assert 'error' not in answer, answer
        return answer['result']

    def open(self, url):
        target = self.ask('Target.createTarget', url='about:blank')['targetId']
        session = self.ask('Target.attachToTarget', targetId=target, flatten=True)
        self.session = session['sessionId']
        for domain in ('Runtime', 'Log', 'Page', 'Network'):
            self.ask(f'{domain}.enable')
        self.ask('Page.navigate', url=url)
        for _ in range(100):
            if self.run('document.readyState == "complete" && location.protocol == "file:"'):
                return
            time.sleep(0.1)
        raise AssertionError('the page did not load in 10 seconds')

    def run(self, script):
        answer = self.ask('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in answer, answer
        return answer['result'].get('value')

    def press(self, key, code):
        for kind in ('keyDown', 'keyUp'):
            self.ask('Input.dispatchKeyEvent', type=kind, key=key, code=key,
                     windowsVirtualKeyCode=code)

    def drawn(self, kind, model):
        """The values of the blue curve, by the numbers at the axis."""
        svg = f'document.querySelectorAll("#{kind} svg")[{model}]'
        d = self.run(f'{svg}.querySelector(".now").getAttribute("d")')
        ticks = self.run(f'[...{svg}.querySelectorAll(".tick")]'
                         '.map(t => [+t.getAttribute("y") - 4, +t.textContent])')
        (y0, v0), (y1, v1) = ticks[0], ticks[-1]
        y = np.array([float(point.split()[1]) for point in re.findall(r'[\d.]+ [\d.]+', d)])
        return v0 + (y - y0) / (y1 - y0) * (v1 - v0)


@pytest.fixture
def browser(tmp_path):
    if not BROWSER:
        pytest.skip('needs Chromium: apt-get install chromium')
    browser = Browser(tmp_path)
    yield browser
    with contextlib.suppress(AssertionError, OSError):
        browser.session = None
        browser.ask('Browser.close')
    browser.to.close()
    browser.of.close()
    browser.process.wait(10)


@pytest.mark.slow
def test_sliders_move_the_curves_to_the_values_of_the_data(browser):
    data = data_of(PAGE)
    browser.open(PAGE.as_uri())
    one, last = data['uniform'].index(1), len(data['lengths']) - 1
    n_heads = len(data['models'][0]['head'][0])

    def check(length, uniform=one, head=None, chosen=0):
        layer, h = divmod(chosen, n_heads)
        for n, model in enumerate(data['models']):
            row = model['uniform'][uniform]
            found = {kind: row[kind][layer][h] for kind in ('entropy', 'distance')} | {
                'loss': row['loss']}
            if head is not None:
                found = model['head'][layer][h][head]
            bins = sum(p <= data['lengths'][length] for p in data['position'])
            for kind in ('loss', 'entropy'):
                near(browser.drawn(kind, n), found[kind][:bins], atol=1e-6)
            shares = found['distance'][length]
            near(browser.drawn('distance', n)[::2] / 100,
                 shares[:len(browser.drawn('distance', n)) // 2], atol=1e-6)
            assert not any(shares[len(browser.drawn('distance', n)) // 2:])

    check(last)
    said = browser.run('byId("summary").textContent')
    browser.run('byId("uniform").focus()')
    browser.press('ArrowRight', 39)
    browser.press('ArrowRight', 39)
    check(last, uniform=one + 2)
    assert browser.run('byId("summary").textContent') != said
    scale = browser.run('byId("uniform").getAttribute("aria-valuetext")')
    assert float(scale) == data['uniform'][one + 2]

    browser.press('Tab', 9)  # to the slider of one head
    assert browser.run('document.activeElement.id') == 'head'
    browser.press('ArrowRight', 39)
    check(last, head=data['one_head'].index(1) + 1)
    assert browser.run('+byId("uniform").value') == one
    browser.press('Tab', 9)
    browser.press('ArrowDown', 40)
    check(last, head=data['one_head'].index(1) + 1, chosen=1)

    browser.run('byId("length").focus()')
    browser.press('ArrowLeft', 37)
    check(last - 1, head=data['one_head'].index(1) + 1, chosen=1)

    for width in (320, 390, 1200):  # nothing is wider than the screen
        browser.ask('Emulation.setDeviceMetricsOverride', width=width, height=800,
                    deviceScaleFactor=1, mobile=width < 1000)
        assert browser.run('document.documentElement.scrollWidth') <= width
    wrong = [event for event in browser.events
             if event.get('method') in ('Runtime.exceptionThrown', 'Log.entryAdded')]
    assert not wrong
    called = [event['params']['request']['url'] for event in browser.events
              if event.get('method') == 'Network.requestWillBeSent']
    assert all(url.startswith(('file:', 'data:')) for url in called)
