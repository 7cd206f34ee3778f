"""
How often the likeliest next token is the right one, by length of the context. Copy this example
for your own evaluation: replace accuracy(), the measurement. Every evaluation needs the rest.

$ python -m lessons.evaluation --lengths=[128,512]

Writes out_dir/accuracy[_LABEL].json
"""

from configurator import configure, settings

from common import setup
from data import Windows
from stage import open_model, print_rows, result_path, results_folder, write_result

# which model, text and device
out_dir = 'out/demo/nope'    # folder of the run to read; results go there, too
init_from = 'last'           # last, best (of out_dir), a checkpoint file, a folder, hf:ORG/NAME
position: str | None = None  # position method; None: the checkpoint's
rope_scaling: str | None = None   # extension of RoPE, such as yarn:4; None: the checkpoint's
scale: float | str | None = None  # softmax scale: a number for all heads, or a scale file
label = ''                   # name of the result; '': named after scale and text
dataset = ''                 # a folder of data/; '': the text that the model was trained on
split = 'test'               # split of the dataset to read
device = 'auto'              # auto, cpu, cuda, mps
dtype = 'auto'               # auto, float32, bfloat16, float16
# what to measure
lengths: list[int] = [128, 256, 512]  # tokens in a window
n_samples = 64               # windows of each length, evenly spaced over the split
tail = 64                    # tokens to predict at the end of each window
batch_tokens = 16384         # tokens in one forward pass; lower it when memory runs out


def accuracy(model, inputs, targets):
    """The share of the last tokens that are predicted, (B,). inputs, targets: (B, T) ids."""
    logits = model(inputs, tail=tail)                              # (B, tail, V)
    right = logits.argmax(-1) == targets[:, -tail:]
    return right.float().mean(1)


def main(given):
    runtime = setup(device, dtype)
    model, info = open_model(init_from, out_dir, runtime, position, rope_scaling, scale)
    folder = results_folder(out_dir, init_from, given)
    path = result_path(folder, 'accuracy', label, info, dataset, split)
    data, rows = Windows(dataset or info['dataset'], split, max(lengths), info=info), []
    longest = data.evenly_spaced(n_samples)
    for T in lengths:
        samples = longest[:, -T - 1:]  # the same last tokens at every length
        shares = runtime.over_windows(samples, batch_tokens, lambda *ids: accuracy(model, *ids))
        error = shares.std(ddof=1) / len(shares) ** 0.5  # over windows
        rows.append({'length': T, 'accuracy': shares.mean(), 'standard_error': error})
    print_rows(runtime.print, rows)
    write_result(path, {'dataset': data.dataset, 'split': split, 'crossing': data.crossing,
                        'rows': rows}, settings(globals()), runtime, info)


if __name__ == '__main__':
    main(configure(globals()))
