"""
sample.py as run: what it prints.

$ python -m pytest tests/test_sample.py
"""

from conftest import mistake, random_model, stage_here

from lib import checkpoints
from lib.tokens import get_tokenizer, tokenizer_state


def test_sample_prints_the_prompt_and_goes_on(tiny_run):
    out = stage_here('sample', f'--out_dir={tiny_run}', '--prompt=def naïve(', '--n_samples=2',
                     '--max_new_tokens=40', '--seed=3', '--device=cpu')
    one, two = out.split('\n---\n')
    assert one.startswith('def naïve(') and two.startswith('def naïve(') and one != two
    assert 10 + 10 < len(one) <= 10 + 40  # of 40 bytes; some may be bytes of one character
    nothing = stage_here('sample', f'--out_dir={tiny_run}', '--prompt=def f', '--max_new_tokens=0')
    assert nothing == 'def f\n'


def save_reciter(path, encoding, tokens):
    """
    A checkpoint of a model that recites `tokens`, no two of them the same: attention and MLP are 0,
    the embedding of a token is a one-hot vector, and the output matrix sends it to the next token.
    """
    assert len(set(tokens[:-1])) == len(tokens) - 1
    model = random_model(vocab_size=encoding.n_vocab, n_embd=264)
    for p in model.parameters():
        p.data.fill_(1 if p.dim() == 1 else 0)
    for i, (token, following) in enumerate(zip(tokens, tokens[1:])):
        model.embed.weight.data[token, i] = 1
        model.head.weight.data[following, i] = 1
    state = checkpoints.checkpoint_state(model, tokenizer_state(encoding), 0, settings={})
    checkpoints.save(path, **state)


def test_characters_of_several_bytes_are_printed_whole_and_broken_ones_marked(tmp_path):
    encoding = get_tokenizer('bytes')
    # broken inside, and at the end
    recited = 'Zoë→🙂'.encode() + '東'.encode()[:2] + b'a' + 'ʼn'.encode()[:1]
    eot = encoding.eot_token
    save_reciter(tmp_path / 'last.pt', encoding, [eot, *recited, eot])
    out = stage_here('sample', f'--out_dir={tmp_path}', '--temperature=0', '--max_new_tokens=100',
                     '--device=cpu')
    assert out == 'Zoë→🙂�a�\n'


def test_sample_of_a_run_that_does_not_exist_is_one_line(tmp_path):
    assert 'last.pt' in mistake('sample', f'--out_dir={tmp_path}')
