"""A headless Chromium that tests drive with real keys and clicks, over its DevTools pipe."""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')


class Browser:
    """One page in Chromium. Pipe: commands and answers are JSON that ends with a zero byte."""

    def __init__(self, pipe_in, pipe_out):
        self.to, self.source, self.number, self.session = pipe_in, pipe_out, 0, None
        self.rest, self.errors = b'', []
        target = self.command('Target.createTarget', url='about:blank')['targetId']
        self.session = self.command('Target.attachToTarget', targetId=target,
                                    flatten=True)['sessionId']
        for domain in 'Page', 'Runtime', 'Network', 'Log':
            self.command(f'{domain}.enable')

    def command(self, method, **params):
        """Send a command and return its result. Errors of the page are kept in self.errors."""
        self.number += 1
        message = {'id': self.number, 'method': method, 'params': params}
        if self.session:
            message['sessionId'] = self.session
        os.write(self.to, json.dumps(message).encode() + b'\0')
        while True:
            while b'\0' not in self.rest:
                part = os.read(self.source, 1 << 20)
                assert part, 'the browser stopped'
                self.rest += part
            line, _, self.rest = self.rest.partition(b'\0')
            answer = json.loads(line)
            if answer.get('method') in ('Runtime.exceptionThrown', 'Log.entryAdded'):
                self.errors.append(json.dumps(answer['params'])[:400])
            if answer.get('id') == self.number:
                assert 'error' not in answer, answer
                return answer['result']

    def open(self, address, width, height, dark=False, script=True):
        """Open a page, with another size, color scheme, or without JavaScript."""
        self.command('Emulation.setDeviceMetricsOverride', width=width, height=height,
                     deviceScaleFactor=1, mobile=width < 500)
        self.command('Emulation.setEmulatedMedia', features=[
            {'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}])
        self.command('Emulation.setScriptExecutionDisabled', value=not script)
        self.command('Page.navigate', url='about:blank')  # else a new fragment loads nothing
        self.command('Page.navigate', url=address)
        if script:
            self.until("document.readyState === 'complete' && !!document.getElementById('status')"
                       ".textContent")

    def value(self, expression):
        """What a JavaScript expression is, as JSON has it."""
        result = self.command('Runtime.evaluate', expression=expression, returnByValue=True,
                              awaitPromise=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def until(self, expression, seconds=120):
        """Wait until an expression is true. Returns the seconds that it took."""
        began = time.monotonic()
        while not self.value(expression):
            assert time.monotonic() - began < seconds, f'{expression} after {seconds} s'
            time.sleep(0.02)
        return time.monotonic() - began

    def place(self, selector, x, y):
        """Where a share of an element's width and height is, after scrolling it into view."""
        return self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f' return [r.left + r.width * {x}, r.top + r.height * {y}]; }})'
            f'(document.querySelector({json.dumps(selector)}))')

    def mouse(self, kind, place, held=False):
        self.command('Input.dispatchMouseEvent', type=kind, x=place[0], y=place[1],
                     button='left' if held or kind != 'mouseMoved' else 'none',
                     buttons=int(held), clickCount=int(kind != 'mouseMoved'))

    def click(self, selector, x=0.5, y=0.5):
        """Click into an element, at a share of its width and height."""
        self.drag(selector, (x, y))

    def drag(self, selector, *shares):
        """Press the mouse at the first share of an element's width and height; move to the rest."""
        places = [self.place(selector, x, y) for x, y in shares]
        self.mouse('mouseMoved', places[0])
        self.mouse('mousePressed', places[0], held=True)
        for place in places[1:]:
            self.mouse('mouseMoved', place, held=True)
        self.mouse('mouseReleased', places[-1])

    def type(self, text):
        for character in text:
            self.command('Input.dispatchKeyEvent', type='char', text=character)

    def key(self, name, times=1):
        """Press a key, such as ArrowRight."""
        codes = {'ArrowLeft': 37, 'ArrowUp': 38, 'ArrowRight': 39, 'ArrowDown': 40, 'Tab': 9,
                 'Home': 36, 'End': 35, 'Escape': 27, 'Delete': 46}
        for _ in range(times):
            for kind in 'rawKeyDown', 'keyUp':
                self.command('Input.dispatchKeyEvent', type=kind, key=name, code=name,
                             windowsVirtualKeyCode=codes[name])


@contextlib.contextmanager
def browser(folder):
    """Inside the `with` block, a Browser. folder: for its files."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()

    def give_pipes():
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4. Copy both
        # out of the way first, because one of them may have the number 3 or 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_commands, write_answers)]
        for end, number in zip(ends, (3, 4)):
            os.dup2(end, number)
            os.close(end)

    process = subprocess.Popen(
        [BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--remote-debugging-pipe',
         f'--user-data-dir={folder}/user'],
        preexec_fn=give_pipes, close_fds=False, stderr=subprocess.DEVNULL)
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        process.terminate()
        process.wait(20)
        os.close(write_commands)
        os.close(read_answers)
