"""
Stream text from a checkpoint, with any softmax scale.

$ python sample.py --prompt='def '                                         # the demo model
$ python sample.py --prompt='def ' --max_new_tokens=1000 --scale=out/demo/nope/scale_head_640.json
"""

from configurator import configure

import torch

from common import can_compile, setup
from generate import generate, store_column_major
from stage import open_model
from tokenizer import get_tokenizer, start_token

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to write
prompt = ''                  # text that the model continues; '': the start of a document
max_new_tokens = 500         # it ends before, if the model writes end-of-text
temperature = 0.8            # 0: always take the likeliest token
top_k: int | None = None     # draw only from the k likeliest tokens; None: from all tokens
seed = 1337                  # another one gives another text
compile = False              # compile one graph for all tokens; pays for thousands of tokens


def main():
    runtime = setup(device, dtype, seed)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    store_column_major(model)
    encoding = get_tokenizer(info['tokenizer'])
    generator = torch.Generator(runtime.device).manual_seed(seed)
    start = [start_token(encoding), *encoding.encode_ordinary(prompt)]
    compiles = can_compile(runtime, compile)

    ids, shown = start[1:], 0  # the prompt is printed, too; shown: characters that are
    with runtime.autocast():
        for token in generate(model, start, max_new_tokens, temperature, top_k, generator,
                              compiles):
            if token == encoding.eot_token:
                break
            ids.append(token)
            text = encoding.decode(ids)  # of all, as a token's text may depend on earlier ones
            if not text.endswith('\ufffd'):  # else its last character is incomplete
                print(text[shown:], end='', flush=True)
                shown = len(text)
    print(encoding.decode(ids)[shown:])


if __name__ == '__main__':
    configure(globals())
    main()
