"""
Stream text from a checkpoint, with any softmax scale.

$ python sample.py --prompt='def '                                         # the demo model
$ python sample.py --prompt='def ' --max_new_tokens=1000 --scale=out/demo/nope/scale_head_640.json
"""

import torch

from configurator import between, configure, settings
from lib.checkpoints import ModelSettings, Run
from lib.devices import can_compile
from lib.generate import generate
from lib.tokens import start_token

scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
prompt = ''                  # text to go on from; empty: the start of a document
n_samples = 1
max_new_tokens = 500         # per sample
temperature = 0.8            # 0 always takes the likeliest token
top_k: int | None = None     # only the k likeliest tokens
top_p: float | None = None   # only the likeliest tokens that together have this probability
seed = 1337
compile = False              # one graph for all tokens; pays from thousands of them on


def main():
    between(globals(), 0, 'n_samples', 'max_new_tokens', 'temperature')
    between(globals(), 1, 'top_k')
    between(globals(), 0, 'top_p', most=1)
    run = Run(settings(globals()), decodes=True)
    model, encoding, dtype = run.model, run.encoding, run.runtime.dtype
    ids = [start_token(encoding), *encoding.encode_ordinary(prompt)]
    generator = torch.Generator(run.runtime.device).manual_seed(seed)
    for i in range(n_samples):
        tokens = ids[1:]
        text = shown = encoding.decode_bytes(tokens).decode(errors='replace')
        print(shown, end='', flush=True)
        with run.runtime.autocast():
            for token in generate(model, ids, max_new_tokens, temperature, top_k, top_p,
                                  encoding.eot_token, generator, dtype,
                                  can_compile(run.runtime, compile)):
                tokens.append(token)
                # All tokens are decoded again, as the text of one depends on those before it.
                text = encoding.decode_bytes(tokens).decode(errors='replace')
                if not text.endswith('\ufffd'):  # or the character is not whole yet
                    print(text[len(shown):], end='', flush=True)
                    shown = text
        print(text[len(shown):])
        if i + 1 < n_samples:
            print('---')


if __name__ == '__main__':
    configure(globals(), ModelSettings)
    main()
