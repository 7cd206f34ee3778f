"""
How often the likeliest next token is the right one, by length of the context: an example of an
evaluation of one's own. The task is accuracy(); the rest is what every evaluation needs.

$ python -m lessons.evaluation --lengths=[128,512]

Writes out_dir/accuracy[_LABEL].json
"""

from configurator import configure, settings
from lib.checkpoints import Run, TextSettings

lengths = [128, 256, 512]  # tokens in a window
n_samples = 64             # windows of each length, evenly spaced over the split


def accuracy(model, inputs, targets):
    """The share of the last 64 tokens that are predicted, (B,). inputs, targets: (B, T) ids."""
    logits = model(inputs, tail=64)                                # (B, 64, V)
    right = logits.argmax(-1) == targets[:, -64:]
    return right.float().mean(1)


def main():
    run, rows = Run(settings(globals()), 'accuracy'), []
    for T in lengths:
        samples = run.windows(T).evenly_spaced(n_samples)
        shares = run.runtime.over_windows(samples, 16384, lambda x, y: accuracy(run.model, x, y))
        run.runtime.print(f'{T:8d} tokens: {shares.mean():.1%}')
        rows.append({'length': T, 'accuracy': shares.mean()})
    run.write('accuracy', {'rows': rows})
    run.close()


if __name__ == '__main__':
    configure(globals(), TextSettings)
    main()
