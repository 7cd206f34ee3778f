"""
Stream text from a checkpoint, with any softmax scale.

$ python sample.py --prompt='def '                                         # the demo model
$ python sample.py --prompt='def ' --max_new_tokens=1000 --scale=out/demo/nope/scale_head_640.json
"""

import torch

from configurator import between, configure, settings
from lib.checkpoints import Run
from lib.devices import can_compile
from lib.errors import UserError
from lib.generate import Decoding, generate
from lib.tokenizers import known_ids, start_token

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to write
prompt = ''                  # text that the model continues; empty: the start of a document
n_samples = 1                # number of continuations
max_new_tokens = 500         # tokens in one sample
temperature = 0.8            # 0: always take the likeliest token
top_k: int | None = None     # draw only from the k likeliest tokens; None: from all tokens
top_p: float | None = None   # draw only from the likeliest tokens with this total probability
seed = 1337
compile = False              # compile one graph for all tokens; pays for thousands of tokens


def print_text(encoding, ids, new_ids):
    """Print the text of ids, then the text of new_ids, an iterator, as it comes."""
    def text_of(ids):
        return encoding.decode_bytes(known_ids(encoding, ids)).decode(errors='replace')

    text = shown = text_of(ids)
    print(shown, end='', flush=True)
    for token in new_ids:
        # Decode all tokens again, because a token's text depends on the tokens before it.
        ids = [*ids, token]
        text = text_of(ids)
        if not text.endswith('\ufffd'):  # else the last character is incomplete
            print(text[len(shown):], end='', flush=True)
            shown = text
    print(text[len(shown):])


def main():
    between(globals(), 0, 'n_samples', 'max_new_tokens', 'temperature')
    between(globals(), 1, 'top_k')
    between(globals(), 0, 'top_p', most=1)
    run = Run(settings(globals()), decodes=True)
    encoding, runtime = run.encoding, run.runtime
    if runtime.world_size > 1:
        raise UserError('sample.py writes in one process. Start it without torchrun.')
    ids = [start_token(encoding), *encoding.encode_ordinary(prompt)]
    how = Decoding(eos=(encoding.eot_token,), cache_dtype=runtime.dtype,
                   compile=can_compile(runtime, compile),
                   temperature=temperature, top_k=top_k, top_p=top_p,
                   generator=torch.Generator(runtime.device).manual_seed(seed))
    for i in range(n_samples):
        if i:
            print('---')
        with runtime.autocast():
            print_text(encoding, ids[1:], generate(run.model, ids, max_new_tokens, how))


if __name__ == '__main__':
    configure(globals())
    main()
