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
from lib.tokenizers import start_token

scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
prompt = ''                  # text that the model continues; empty: the start of a document
n_samples = 1
max_new_tokens = 500         # per sample
temperature = 0.8            # 0: always take the likeliest token
top_k: int | None = None     # draw only from the k likeliest tokens; None: from all tokens
top_p: float | None = None   # draw only from the likeliest tokens with this total probability
seed = 1337
compile = False              # compile one graph for all tokens; pays for thousands of tokens


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
                # Decode all tokens again, because a token's text depends on the tokens before it.
                text = encoding.decode_bytes(tokens).decode(errors='replace')
                if not text.endswith('\ufffd'):  # else the last character is incomplete
                    print(text[len(shown):], end='', flush=True)
                    shown = text
        print(text[len(shown):])
        if i + 1 < n_samples:
            print('---')


if __name__ == '__main__':
    configure(globals(), ModelSettings)
    main()
