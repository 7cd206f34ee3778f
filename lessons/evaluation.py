"""
How often the likeliest next token is the right one, by length of the context. Copy this example
for your own evaluation: replace accuracy(), the measurement. Every evaluation needs the rest.

$ python -m lessons.evaluation --lengths=[128,512]

Writes out_dir/accuracy[_LABEL].json
"""

from configurator import between, configure, settings
from lib.checkpoints import Run
from lib.scales import vectors_for

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after the scale
dataset: str | None = None   # a folder of data/; None: the text that the model was trained on
split = 'test'               # split of the dataset to read
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to measure
lengths = [128, 256, 512]    # tokens in a window
n_samples = 64               # windows of each length, evenly spaced over the split


def accuracy(model, inputs, targets):
    """The share of the last 64 tokens that are predicted, (B,). inputs, targets: (B, T) ids."""
    logits = model(inputs, tail=64)                                # (B, 64, V)
    right = logits.argmax(-1) == targets[:, -64:]
    return right.float().mean(1)


def main():
    between(globals(), 1, 'lengths', 'n_samples')
    run, rows = Run(settings(globals()), 'accuracy'), []
    longest = run.windows(max(lengths)).evenly_spaced(n_samples)
    for T in lengths:
        samples = longest[:, -T - 1:]  # the same last tokens at every length
        with vectors_for(run.model, T):
            shares = run.runtime.over_windows(samples, 16384, lambda *x: accuracy(run.model, *x))
        run.runtime.print(f'{T:8d} tokens: {shares.mean():.1%}')
        rows.append({'length': T, 'accuracy': shares.mean()})
    run.write('accuracy', {'rows': rows})
    run.close()


if __name__ == '__main__':
    configure(globals())
    main()
